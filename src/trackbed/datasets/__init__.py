"""What a sample holds: the datasets, their configuration and their tokenizers."""

from trackbed.datasets.adapters import ByteTokenizer, HuggingFaceTokenizer, MegatronIdentity, NullTokenizer
from trackbed.datasets.blended import BlendedDataset
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.gpt import GPTDataset
from trackbed.datasets.gpt_config import GPTDatasetConfig
from trackbed.datasets.megatron import LowLevelDataset, MegatronDataset
from trackbed.datasets.mock import MockGPTDataset, MockGPTLowLevelDataset
from trackbed.datasets.tokenizer import MegatronTokenizer

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetConfig",
    "ByteTokenizer",
    "GPTDataset",
    "GPTDatasetConfig",
    "HuggingFaceTokenizer",
    "LowLevelDataset",
    "MegatronDataset",
    "MegatronIdentity",
    "MegatronTokenizer",
    "MockGPTDataset",
    "MockGPTLowLevelDataset",
    "NullTokenizer",
]
