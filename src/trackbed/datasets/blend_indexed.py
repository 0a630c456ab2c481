"""Orders of a blend that an index of two arrays holds.

Shapes: K datasets, N samples, B positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cache import Allocate, Arrays, damage
from trackbed.datasets.blend_order import BlendSpec
from trackbed.datasets.index_arrays import IndexArrays
from trackbed.datasets.samples import Draws
from trackbed.index import Order

__all__ = ["ARRAYS", "IndexedOrder"]

ARRAYS: Final = ("dataset_index", "dataset_sample_index")


class IndexedOrder(ABC):
    """An order that is held by an index of two arrays."""

    def __init__(self, spec: BlendSpec) -> None:
        self.spec = spec
        self.index = IndexArrays(*ARRAYS)

    @abstractmethod
    def build(self, allocate: Allocate) -> Arrays:
        """Builds the two arrays."""

    @property
    def order(self) -> Order:
        """The order of many positions."""
        return self

    def check(self) -> None:  # noqa: B027  only one order knows more
        """Does nothing: the index tells what is drawn."""

    def __len__(self) -> int:
        """N, samples in the order."""
        return self.spec.num_samples

    def label(self, number: int) -> Any:
        """The number of a dataset."""
        return number

    def sample_at(self, position: int) -> tuple[int, int]:
        """Dataset and sample at a position."""
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

    def draw(self, positions: npt.NDArray[np.int64]) -> Draws:
        """`[B]` dataset and `[B]` sample at positions."""
        chosen, samples = (array[positions] for array in self.index.several())
        # A number that is too large is found when the sample is cut; a negative one would count from the end.
        if len(positions) and (samples.min() < 0 or chosen.min() < 0):
            for position in positions.tolist():
                self.sample_at(position % len(self))
        return chosen.astype(np.int32), samples.astype(np.int64)

    def locate(self, positions: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Draws:
        """`[B]` dataset and `[B]` sample at positions."""
        return self.draw(np.asarray(positions, dtype=np.int64))

    def counts_before(self, position: int) -> npt.NDArray[np.int64]:
        """`[K]` number of samples drawn from each dataset before a position. Reads the index up to there."""
        chosen = self.index.several()[0]
        return np.bincount(chosen[:position], minlength=len(self.spec.datasets)).astype(np.int64)
