"""The interface of a dataset's samples, implemented for each order.

Shapes: B positions, R samples, S tokens of a sample, X 1 if a sample has an extra token, else 0.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.datasets.batches.sources import SampleLayout
from trackbed.datasets.index_arrays import IndexArrays

SampleLocations = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""`[B]` dataset of each sample, and `[B]` its number in that dataset."""


class SamplePieces(NamedTuple):
    """The pieces of a sample in order, as columns: documents, and half-open ranges of their tokens."""

    documents: list[int]
    starts: list[int]
    stops: list[int]


class Samples(Protocol):
    """The samples of one dataset in one order."""

    @property
    def index(self) -> IndexArrays:
        """The index that defines the samples; it has no arrays if the order needs none."""
        ...

    def __len__(self) -> int:
        """R, samples in the order: at least as many as were requested."""
        ...

    def can_give(self, num_samples: int) -> bool:
        """True if there are at least `num_samples` samples. Does not need an index that is not built yet."""
        ...

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one epoch of the split."""
        ...

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the samples, besides the files."""
        ...

    def checksum(self) -> str:
        """Returns the CRC-32 of the split's document lengths. May read them."""
        ...

    def layout(self) -> SampleLayout:
        """Returns the layout of the samples in their files, for the kernel that gathers batches."""
        ...

    def locate(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        """Returns dataset 0 and the number in `layout` of the sample at each of `[B]` positions in `[-R, R)`.

        Raises:
            IndexError: a position is out of range; the kernel raises it for layouts of visits.
        """
        ...

    def pieces(self, position: int) -> SamplePieces:
        """Returns the pieces of the sample at a position in `[-R, R)`, empty documents included.

        Raises:
            IndexError: the position is out of range.
            CacheError: an index is damaged.
        """
        ...

    def read(self, position: int, *, padding: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns `[S + X]` tokens of the sample at a position, padded if short, and the documents of its pieces.

        Raises:
            IndexError: the position is out of range.
            CacheError: an index is damaged.
            FormatError: the files are shorter than their index says.
        """
        ...
