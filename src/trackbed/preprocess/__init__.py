"""Tokenisation of raw text (JSON lines, plain text, Parquet) to indexed files on all cores, and the tools around it."""

from trackbed.datasets.tokenizers.fastokens import open_fastest_tokenizer
from trackbed.datasets.tokenizers.kinds import BYTES, maps_special_tokens, open_tokenizer
from trackbed.preprocess.chat.config import ChatConfig
from trackbed.preprocess.config import ImagesConfig, PreprocessConfig, available_cores, output_prefix
from trackbed.preprocess.engines import FailedAttempt
from trackbed.preprocess.inspection import FirstDocument, Inspection, LengthBin, first_documents, inspect_pair
from trackbed.preprocess.pairs import ShardGroupCounts, count_shards, find_pairs
from trackbed.preprocess.pipeline import preprocess
from trackbed.preprocess.report import Output, Report
from trackbed.preprocess.splitter import SENTENCEX, SentenceSplitter, open_splitter
from trackbed.preprocess.tokenise_chunk import BatchTokenizer, FlatTokenizer
from trackbed.preprocess.train_tokenizer import TrainedTokenizer, TrainingConfig, train_tokenizer

__all__ = [
    "BYTES",
    "SENTENCEX",
    "BatchTokenizer",
    "ChatConfig",
    "FailedAttempt",
    "FirstDocument",
    "FlatTokenizer",
    "ImagesConfig",
    "Inspection",
    "LengthBin",
    "Output",
    "PreprocessConfig",
    "Report",
    "SentenceSplitter",
    "ShardGroupCounts",
    "TrainedTokenizer",
    "TrainingConfig",
    "available_cores",
    "count_shards",
    "find_pairs",
    "first_documents",
    "inspect_pair",
    "maps_special_tokens",
    "open_fastest_tokenizer",
    "open_splitter",
    "open_tokenizer",
    "output_prefix",
    "preprocess",
    "train_tokenizer",
]
