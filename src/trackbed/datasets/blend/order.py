"""The interface of a blend's order, a map from positions to datasets and their samples, and orders in an index.

Shapes: K datasets, N samples, B positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cache import Allocate, Arrays, Entry, Request, damage
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.megatron_dataset import MegatronDataset
from trackbed.datasets.samples import IndexArrays, SampleLocations
from trackbed.errors import ArgumentError, OversampleError
from trackbed.index import PERMUTATION_VERSION, InstantOrder, Order, Split
from trackbed.index.balanced import BALANCED_VERSION
from trackbed.index.instant_plan import checked_positions
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
    stages = [
        [int(first), [float(weight) for weight in weights], *(int(length) for length in ramp if length)]
        for first, weights, *ramp in config.blend_stages or ()
    ]
    return {
        "random_seed": int(config.random_seed),
        "versions": [BALANCED_VERSION, InstantOrder.VERSION, PERMUTATION_VERSION],
        "stages": stages,
        "limits": [config.blend_max_epochs, config.blend_when_exhausted] if config.blend_max_epochs else [],
        "locality": [config.shuffle_block, config.shuffle_window],
    }


ARRAYS: Final = ("dataset_index", "dataset_sample_index")


class IndexedOrder(ABC):
    """Base of the orders that are stored in an index of two arrays."""

    def __init__(self, spec: BlendSpec) -> None:
        self.spec = spec
        self.index = IndexArrays(*ARRAYS)

    @abstractmethod
    def build(self, allocate: Allocate) -> Arrays:
        """Builds the two arrays."""

    def __getstate__(self) -> dict[str, Any]:
        """Returns the spec and a copy of the arrays that do not lie in the cache."""
        return {"spec": self.spec, "index": copy(self.index)}

    @property
    def order(self) -> Order:
        """The order of many positions."""
        return self

    def check(self) -> None:  # noqa: B027  only one order has something to check
        """Does nothing: the draws are checked when the index is built."""

    def __len__(self) -> int:
        """N, samples in the order."""
        return self.spec.num_samples

    def label(self, number: int) -> Any:
        """Returns the number of a dataset."""
        return number

    def sample_at(self, position: int) -> tuple[int, int]:
        """Returns dataset and sample at a position; raises CacheError if the index is damaged."""
        chosen, samples = self.index.several()
        dataset, sample, datasets = int(chosen[position]), int(samples[position]), self.spec.datasets
        if not 0 <= dataset < len(datasets):
            raise self._damage(ARRAYS[:1], f"datasets in [0, {len(datasets)})", f"{dataset} at {position}")
        if not 0 <= sample < len(datasets[dataset]):
            wanted = f"samples in [0, {len(datasets[dataset])}) of dataset {dataset}"
            raise self._damage(ARRAYS, wanted, f"{sample} at {position}")
        return dataset, sample

    def _damage(self, names: Sequence[str], wanted: str, found: str) -> Exception:
        return damage(self.index.arrays or {}, names, wanted, found)

    def draw(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns `[B]` dataset and `[B]` sample at positions."""
        chosen, samples = (array[positions] for array in self.index.several())
        # A number that is too large is found when the sample is read; a negative one would count from the end.
        if len(positions) and (samples.min() < 0 or chosen.min() < 0):
            for position in positions.tolist():
                self.sample_at(position % len(self))
        return chosen.astype(np.int32), samples.astype(np.int64)

    def locate(self, positions: Sequence[int] | npt.NDArray[np.integer[Any]]) -> SampleLocations:
        """Returns `[B]` dataset and `[B]` sample at positions in `[0, N)`; raises ArgumentError at others."""
        return self.draw(checked_positions(positions, stop=len(self)))

    def counts_before(self, position: int) -> npt.NDArray[np.int64]:
        """Returns `[K]` number of samples drawn from each dataset before a position. Reads the index up to there."""
        if not 0 <= position <= len(self):
            raise ArgumentError(f"position must be in [0, {len(self)}], found {position}")
        chosen = self.index.several()[0]
        return np.bincount(chosen[:position], minlength=len(self.spec.datasets)).astype(np.int64)
