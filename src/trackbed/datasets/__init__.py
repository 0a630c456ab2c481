"""Datasets of samples, their configuration and their tokenizers.

Modules are imported on first access to a name, so that a program that only tokenises does not import torch.
"""

from typing import TYPE_CHECKING

from trackbed.lazy_names import lazy_names

if TYPE_CHECKING:
    from trackbed.datasets.batches.batch import Batch as Batch
    from trackbed.datasets.blend.dataset import BlendedDataset as BlendedDataset
    from trackbed.datasets.config import BlendedMegatronDatasetConfig as BlendedMegatronDatasetConfig
    from trackbed.datasets.gpt.config import GPTDatasetConfig as GPTDatasetConfig
    from trackbed.datasets.gpt.dataset import GPTDataset as GPTDataset
    from trackbed.datasets.gpt.dataset import Piece as Piece
    from trackbed.datasets.masked.bert import BERTMaskedWordPieceDataset as BERTMaskedWordPieceDataset
    from trackbed.datasets.masked.bert import BERTMaskedWordPieceDatasetConfig as BERTMaskedWordPieceDatasetConfig
    from trackbed.datasets.masked.config import MaskedWordPieceDatasetConfig as MaskedWordPieceDatasetConfig
    from trackbed.datasets.masked.dataset import MaskedWordPieceDataset as MaskedWordPieceDataset
    from trackbed.datasets.masked.t5 import T5MaskedWordPieceDataset as T5MaskedWordPieceDataset
    from trackbed.datasets.masked.t5 import T5MaskedWordPieceDatasetConfig as T5MaskedWordPieceDatasetConfig
    from trackbed.datasets.megatron_dataset import LowLevelDataset as LowLevelDataset
    from trackbed.datasets.megatron_dataset import MegatronDataset as MegatronDataset
    from trackbed.datasets.mock import MockGPTDataset as MockGPTDataset
    from trackbed.datasets.mock import MockGPTLowLevelDataset as MockGPTLowLevelDataset
    from trackbed.datasets.mock import MockMultimodalDataset as MockMultimodalDataset
    from trackbed.datasets.mock import MultimodalDatasetConfig as MultimodalDatasetConfig
    from trackbed.datasets.tokenizers.base import MegatronIdentity as MegatronIdentity
    from trackbed.datasets.tokenizers.base import MegatronTokenizer as MegatronTokenizer
    from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer as ByteTokenizer
    from trackbed.datasets.tokenizers.bytes_and_numbers import NullTokenizer as NullTokenizer
    from trackbed.datasets.tokenizers.huggingface import HuggingFaceTokenizer as HuggingFaceTokenizer
    from trackbed.datasets.tokenizers.kinds import open_tokenizer as open_tokenizer
    from trackbed.datasets.tokenizers.sentencepiece import SentencePieceTokenizer as SentencePieceTokenizer
    from trackbed.datasets.tokenizers.tiktoken import TiktokenTokenizer as TiktokenTokenizer
    from trackbed.datasets.tokenizers.transformers import TransformersTokenizer as TransformersTokenizer
    from trackbed.datasets.tokenizers.wordpiece import WordPieceTokenizer as WordPieceTokenizer

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "trackbed.datasets.batches.batch": "Batch",
        "trackbed.datasets.blend.dataset": "BlendedDataset",
        "trackbed.datasets.config": "BlendedMegatronDatasetConfig",
        "trackbed.datasets.gpt.config": "GPTDatasetConfig",
        "trackbed.datasets.gpt.dataset": "GPTDataset Piece",
        "trackbed.datasets.masked.bert": "BERTMaskedWordPieceDataset BERTMaskedWordPieceDatasetConfig",
        "trackbed.datasets.masked.config": "MaskedWordPieceDatasetConfig",
        "trackbed.datasets.masked.dataset": "MaskedWordPieceDataset",
        "trackbed.datasets.masked.t5": "T5MaskedWordPieceDataset T5MaskedWordPieceDatasetConfig",
        "trackbed.datasets.megatron_dataset": "LowLevelDataset MegatronDataset",
        "trackbed.datasets.mock": "MockGPTDataset MockGPTLowLevelDataset MockMultimodalDataset MultimodalDatasetConfig",
        "trackbed.datasets.tokenizers.base": "MegatronIdentity MegatronTokenizer",
        "trackbed.datasets.tokenizers.bytes_and_numbers": "ByteTokenizer NullTokenizer",
        "trackbed.datasets.tokenizers.huggingface": "HuggingFaceTokenizer",
        "trackbed.datasets.tokenizers.kinds": "open_tokenizer",
        "trackbed.datasets.tokenizers.sentencepiece": "SentencePieceTokenizer",
        "trackbed.datasets.tokenizers.tiktoken": "TiktokenTokenizer",
        "trackbed.datasets.tokenizers.transformers": "TransformersTokenizer",
        "trackbed.datasets.tokenizers.wordpiece": "WordPieceTokenizer",
    },
)
