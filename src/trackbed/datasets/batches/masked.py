"""Batches of masked samples: their tensors, and the kernel that makes them.

Shapes: B samples of a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trackbed.datasets.batches.reader import BatchForm
from trackbed.kernels import FetchedBytes, Gathered, MaskedBatchArrays, MaskingTable, SampleSources, gather_masked


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSpec:
    """Specification of the tensors in the batches of a masked dataset. See `BatchSpec`."""

    lengths: tuple[tuple[str, int | None], ...]
    """Names of the tensors, in the order of a sample's keys, and their lengths; None for a number."""
    dataset_id: torch.dtype | None
    """Dtype of the dataset's number in a blend; None without a blend."""

    def tensors(self, size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of each tensor of a batch of B samples, in the order of a sample's keys."""
        label = {} if self.dataset_id is None else {"dataset_id": (self.dataset_id, (size,))}
        own = {name: (torch.int64, (size,) if length is None else (size, length)) for name, length in self.lengths}
        return {**label, **own}

    def memory(self, size: int, arrays: dict[str, npt.NDArray[Any]]) -> MaskedBatchArrays:
        """Returns the memory of a batch as the kernel takes it."""
        return MaskedBatchArrays(arrays)


class MaskedForm(BatchForm):
    """Form of the batches of masked datasets of one configuration.

    Args:
        table: what decides their samples.
        spec: their tensors.
    """

    spec: MaskedSpec

    def __init__(self, table: MaskingTable, spec: MaskedSpec) -> None:
        self.spec = spec
        self._table = table

    @property
    def shared(self) -> Mapping[str, torch.Tensor]:
        """No tensor: each sample has its own."""
        return {}

    def gather(
        self,
        sources: SampleSources,
        datasets: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        arrays: MaskedBatchArrays | None,
        *,
        fetched: FetchedBytes,
        num_threads: int | None,
    ) -> Gathered:
        """Fills a batch; see `BatchForm.gather`."""
        return gather_masked(
            sources, datasets, positions, arrays, self._table, fetched=fetched, num_threads=num_threads
        )
