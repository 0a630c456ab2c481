"""Mock datasets of synthetic tokens, and of text and images, for trying out a training job without data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from trackbed.datasets.gpt.config import GPTDatasetConfig
from trackbed.datasets.gpt.dataset import GPTDataset
from trackbed.datasets.megatron_dataset import LowLevelDataset
from trackbed.errors import ArgumentError
from trackbed.index.splits import Split


class MockGPTLowLevelDataset:
    """Documents 1, 2, 3, ... modulo the vocabulary, each ended by the tokenizer's `eod`.

    Args:
        tokenizer: provides `vocab_size` and `eod`.
    """

    seed: int = 0
    """Seed of the lengths."""

    size: int = 100000
    """Number of documents."""

    max_sequence_length: int = 4096
    """Exclusive upper bound of the number of tokens in a document."""

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eod_token = tokenizer.eod
        self.sequence_lengths = np.random.default_rng(self.seed).integers(
            1, self.max_sequence_length, size=self.size, dtype=np.int32
        )

    def __len__(self) -> int:
        """Number of documents."""
        return self.size

    def __getitem__(self, idx: int) -> npt.NDArray[np.int64]:
        """Returns `[T]` tokens of one document."""
        length = int(self.sequence_lengths[idx])
        return np.append(np.arange(1, length, dtype=np.int64) % self.vocab_size, self.eod_token)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.int64]:
        """Returns tokens `[offset, offset + length)` of one document, to its end if `length` is None."""
        return self[idx][offset : None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """GPT dataset over synthetic documents.

    Args:
        dataset: the documents.
        dataset_path: None.
        indices: documents that belong to this split.
        num_samples: lowest number of samples, or None for one epoch.
        index_split: the split.
        config: a configuration without a blend.

    Raises:
        ArgumentError: the configuration names real data.
    """

    _ORDERS: ClassVar[tuple[str, ...]] = ("megatron", "balanced")

    def __init__(
        self,
        dataset: MockGPTLowLevelDataset,
        dataset_path: str | None,
        indices: npt.NDArray[np.integer[Any]],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        if not config.mock:
            raise ArgumentError("a mock dataset needs a config without blend and blend_per_split, found one")
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Returns the number of documents."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> LowLevelDataset:  # type: ignore[override]
        """Generates the documents."""
        return MockGPTLowLevelDataset(config.tokenizer)


Sample = dict[str, Any]


def _unchanged(sample: Sample) -> Sample:
    return sample


@dataclass
class MultimodalDatasetConfig(GPTDatasetConfig):
    """Configuration with the fields and defaults of megatron-core 0.16.1.

    Raises:
        ArgumentError: fields that are missing, contradict each other or are out of range.
    """

    image_h: int | None = None
    """Height of the images in pixels; required."""

    image_w: int | None = None
    """Width of the images in pixels; required."""

    preprocess_func: Callable[[Sample], Sample] = _unchanged
    """Called with each sample. Returns the sample that the dataset returns."""

    def __post_init__(self) -> None:
        """Checks the fields."""
        super().__post_init__()
        for name in ("image_h", "image_w"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name} must be an integer of at least 1, found {value!r}")


class MockMultimodalDataset(MockGPTDataset):
    """Mock GPT dataset with an image of zeros in each sample. See `MockGPTDataset`."""

    config: MultimodalDatasetConfig

    def __getitem__(self, idx: int | None) -> Sample:
        """Returns a sample of `MockGPTDataset` with `image` `[3, H, W]` in float32, after `preprocess_func`."""
        sample = super().__getitem__(idx)
        height, width = self.config.image_h, self.config.image_w
        sample["image"] = torch.zeros((3, height, width), dtype=torch.float32)  # type: ignore[arg-type]  # checked
        return self.config.preprocess_func(sample)
