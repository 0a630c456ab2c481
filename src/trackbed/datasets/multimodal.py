"""Mock datasets of text and images, for trying out a training job without data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trackbed.datasets.gpt.config import GPTDatasetConfig
from trackbed.datasets.mock import MockGPTDataset
from trackbed.errors import ArgumentError

__all__ = ["MockMultimodalDataset", "MultimodalDatasetConfig"]

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
                msg = f"{name} must be an integer of at least 1, found {value!r}"
                raise ArgumentError(msg)


class MockMultimodalDataset(MockGPTDataset):
    """Mock GPT dataset with an image of zeros in each sample. See `MockGPTDataset`."""

    config: MultimodalDatasetConfig

    def __getitem__(self, idx: int | None) -> Sample:
        """Returns a sample of `MockGPTDataset` with `image` `[3, H, W]` in float32, after `preprocess_func`."""
        sample = super().__getitem__(idx)
        height, width = self.config.image_h, self.config.image_w
        sample["image"] = torch.zeros((3, height, width), dtype=torch.float32)  # type: ignore[arg-type]  # checked
        return self.config.preprocess_func(sample)
