"""Orders of a blend that are stored in an index of two arrays.

Shapes: K datasets, N samples, B positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cache import Allocate, Arrays, damage
from trackbed.datasets.blend.order import BlendSpec
from trackbed.datasets.index_arrays import IndexArrays
from trackbed.datasets.samples import SampleLocations
from trackbed.errors import ArgumentError
from trackbed.index import Order
from trackbed.index.instant_plan import checked_positions

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
        """Returns the spec and a copy of the arrays, without those of the cache."""
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
