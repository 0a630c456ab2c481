"""The interface of a blend's order: a map from positions to datasets and their samples.

Shapes: K datasets, N samples, B positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cache import Allocate, Arrays, Entry, Request
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.index_arrays import IndexArrays
from trackbed.datasets.megatron_dataset import MegatronDataset
from trackbed.datasets.samples import SampleLocations
from trackbed.errors import OversampleError
from trackbed.index import PERMUTATION_VERSION, InstantOrder, Order, Split
from trackbed.index.balanced import BALANCED_VERSION
from trackbed.plural import number_of


@dataclass(frozen=True)
class BlendSpec:
    """Everything that decides the order of a blend.

    Args:
        datasets: `[K]` datasets.
        weights: `[K]` shares if `size` is given, else the number of samples drawn from each dataset.
        size: N, or None for the sum of the weights.
        split: the split of the datasets.
        config: configuration of the blend.
    """

    datasets: Sequence[MegatronDataset]
    weights: Sequence[float]
    size: int | None
    split: Split
    config: BlendedMegatronDatasetConfig

    @property
    def num_samples(self) -> int:
        """N, samples in the blend."""
        return int(sum(self.weights)) if self.size is None else self.size

    def check_draws(self, drawn: Sequence[int]) -> None:
        """Raises OversampleError if a dataset has fewer samples than the `[K]` that are drawn from it."""
        for number, (dataset, count) in enumerate(zip(self.datasets, drawn, strict=True)):
            if not dataset.can_give(count):
                raise OversampleError(
                    f"{dataset.dataset_path}, split {self.split.name}: the blend may draw at most the "
                    f"{number_of(len(dataset), 'sample')} of dataset {number}, found {count:,}; raise "
                    f"mid_level_dataset_surplus, now {self.config.mid_level_dataset_surplus}"
                )


class BlendOrder(Protocol):
    """The order of a blend, as used by its dataset. Positions are in `[0, N)` unless a method says otherwise."""

    @property
    def index(self) -> IndexArrays:
        """The index that stores the order; it has no arrays if the order is computed."""
        ...

    @property
    def id_dtype(self) -> torch.dtype:
        """Dtype of the datasets' numbers in a batch."""
        ...

    @property
    def order(self) -> Order | None:
        """The order as a lookup of many positions; None if it has no positions."""
        ...

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the order, besides datasets, weights and size."""
        ...

    def check(self) -> None:
        """Raises an error if a dataset has too few samples, as far as that is known without the index."""
        ...

    def request(self, entry: Callable[[], Entry | None]) -> Request | None:
        """Returns the request for the index, or None if it is kept in memory.

        Args:
            entry: returns the cache entry under Megatron Core's name, or None without a cache.
        """
        ...

    def build(self, allocate: Allocate) -> Arrays:
        """Builds the arrays of the index."""
        ...

    def sample_at(self, position: int) -> tuple[int, int]:
        """Returns dataset and sample at a position; raises CacheError if the index is damaged."""
        ...

    def label(self, number: int) -> Any:
        """Returns the number of a dataset as stored in its samples."""
        ...

    def draw(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns `[B]` dataset and `[B]` sample at positions in `[-N, N)`; raises IndexError for others."""
        ...


def own_decisions(config: BlendedMegatronDatasetConfig) -> dict[str, Any]:
    """Returns everything that decides an order other than Megatron Core's, besides datasets, weights and size."""
    stages = [[int(first), [float(weight) for weight in weights]] for first, weights in config.blend_stages or ()]
    return {
        "random_seed": int(config.random_seed),
        "versions": [BALANCED_VERSION, InstantOrder.VERSION, PERMUTATION_VERSION],
        "stages": stages,
        "limits": [config.blend_max_epochs, config.blend_when_exhausted] if config.blend_max_epochs else [],
        "locality": [config.shuffle_block, config.shuffle_window],
    }
