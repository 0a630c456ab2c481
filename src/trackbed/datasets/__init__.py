"""Datasets of samples, their configuration and their tokenizers.

Modules are imported on first access to a name, so that a program that only tokenises does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trackbed.datasets.batches.batch import Batch
    from trackbed.datasets.blend.dataset import BlendedDataset
    from trackbed.datasets.config import BlendedMegatronDatasetConfig
    from trackbed.datasets.gpt.config import GPTDatasetConfig
    from trackbed.datasets.gpt.dataset import GPTDataset, Piece
    from trackbed.datasets.masked.bert import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from trackbed.datasets.masked.config import MaskedWordPieceDatasetConfig
    from trackbed.datasets.masked.dataset import MaskedWordPieceDataset
    from trackbed.datasets.masked.t5 import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
    from trackbed.datasets.megatron_dataset import LowLevelDataset, MegatronDataset
    from trackbed.datasets.mock import (
        MockGPTDataset,
        MockGPTLowLevelDataset,
        MockMultimodalDataset,
        MultimodalDatasetConfig,
    )
    from trackbed.datasets.tokenizers.adapter import MegatronIdentity
    from trackbed.datasets.tokenizers.base import MegatronTokenizer
    from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer, NullTokenizer
    from trackbed.datasets.tokenizers.huggingface import HuggingFaceTokenizer
    from trackbed.datasets.tokenizers.kinds import open_tokenizer
    from trackbed.datasets.tokenizers.sentencepiece import SentencePieceTokenizer
    from trackbed.datasets.tokenizers.tiktoken import TiktokenTokenizer
    from trackbed.datasets.tokenizers.transformers import TransformersTokenizer
    from trackbed.datasets.tokenizers.wordpiece import WordPieceTokenizer

__all__ = [
    "BERTMaskedWordPieceDataset",
    "BERTMaskedWordPieceDatasetConfig",
    "Batch",
    "BlendedDataset",
    "BlendedMegatronDatasetConfig",
    "ByteTokenizer",
    "GPTDataset",
    "GPTDatasetConfig",
    "HuggingFaceTokenizer",
    "LowLevelDataset",
    "MaskedWordPieceDataset",
    "MaskedWordPieceDatasetConfig",
    "MegatronDataset",
    "MegatronIdentity",
    "MegatronTokenizer",
    "MockGPTDataset",
    "MockGPTLowLevelDataset",
    "MockMultimodalDataset",
    "MultimodalDatasetConfig",
    "NullTokenizer",
    "Piece",
    "SentencePieceTokenizer",
    "T5MaskedWordPieceDataset",
    "T5MaskedWordPieceDatasetConfig",
    "TiktokenTokenizer",
    "TransformersTokenizer",
    "WordPieceTokenizer",
    "open_tokenizer",
]

_MODULES = {
    "BERTMaskedWordPieceDataset": "masked.bert",
    "BERTMaskedWordPieceDatasetConfig": "masked.bert",
    "Batch": "batches.batch",
    "BlendedDataset": "blend.dataset",
    "BlendedMegatronDatasetConfig": "config",
    "ByteTokenizer": "tokenizers.bytes_and_numbers",
    "GPTDataset": "gpt.dataset",
    "GPTDatasetConfig": "gpt.config",
    "HuggingFaceTokenizer": "tokenizers.huggingface",
    "LowLevelDataset": "megatron_dataset",
    "MaskedWordPieceDataset": "masked.dataset",
    "MaskedWordPieceDatasetConfig": "masked.config",
    "MegatronDataset": "megatron_dataset",
    "MegatronIdentity": "tokenizers.adapter",
    "MegatronTokenizer": "tokenizers.base",
    "MockGPTDataset": "mock",
    "MockGPTLowLevelDataset": "mock",
    "MockMultimodalDataset": "mock",
    "MultimodalDatasetConfig": "mock",
    "NullTokenizer": "tokenizers.bytes_and_numbers",
    "Piece": "gpt.dataset",
    "SentencePieceTokenizer": "tokenizers.sentencepiece",
    "T5MaskedWordPieceDataset": "masked.t5",
    "T5MaskedWordPieceDatasetConfig": "masked.t5",
    "TiktokenTokenizer": "tokenizers.tiktoken",
    "TransformersTokenizer": "tokenizers.transformers",
    "WordPieceTokenizer": "tokenizers.wordpiece",
    "open_tokenizer": "tokenizers.kinds",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
