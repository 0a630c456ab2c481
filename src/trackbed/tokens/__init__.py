"""Indexed token files: the tokens in a `.bin`, the starts of sequences and documents in an `.idx`."""

from trackbed.tokens.commit import finish_pair
from trackbed.tokens.dtype import DType
from trackbed.tokens.format import SequenceIndex, identity, open_index
from trackbed.tokens.group import IndexedGroup
from trackbed.tokens.merge import merge
from trackbed.tokens.paths import get_bin_path, get_idx_path, get_seal_path
from trackbed.tokens.reader import IndexedDataset
from trackbed.tokens.seal import seal
from trackbed.tokens.source import MappedSource
from trackbed.tokens.stored.config import ObjectStorageConfig, S3Config, default_idx_cache
from trackbed.tokens.verify import Verified, verify, verify_content
from trackbed.tokens.writer import IndexedDatasetBuilder

__all__ = [
    "DType",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "IndexedGroup",
    "MappedSource",
    "ObjectStorageConfig",
    "S3Config",
    "SequenceIndex",
    "Verified",
    "default_idx_cache",
    "finish_pair",
    "get_bin_path",
    "get_idx_path",
    "get_seal_path",
    "identity",
    "merge",
    "open_index",
    "seal",
    "verify",
    "verify_content",
]
