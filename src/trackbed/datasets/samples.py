"""The interface of a dataset's samples, which every order implements.

Shapes: B positions, R samples, S tokens of a sample, X 1 if a sample has an extra token, else 0.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.datasets.index_arrays import IndexArrays
from trackbed.datasets.sources import Layout

__all__ = ["Draws", "Pieces", "Samples"]

Draws = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]
"""`[B]` dataset of each sample, and `[B]` its number there."""


class Pieces(NamedTuple):
    """The documents that a sample is cut from, in its order, and which of their tokens, half-open."""

    documents: list[int]
    starts: list[int]
    stops: list[int]


class Samples(Protocol):
    """The samples of one dataset in one order."""

    @property
    def index(self) -> IndexArrays:
        """The index that names the samples; without arrays in an order that needs none."""
        ...

    def __len__(self) -> int:
        """R, samples in the order: at least as many as were requested."""
        ...

    def can_give(self, num_samples: int) -> bool:
        """True if there are so many samples; an index that is still to be built is not needed to tell."""
        ...

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the tokens of the split give once."""
        ...

    def decisions(self) -> dict[str, Any]:
        """Everything that decides the samples, besides the files."""
        ...

    def checksum(self) -> str:
        """CRC-32 of the tokens in each of the split's documents. May read them."""
        ...

    def layout(self) -> Layout:
        """The layout of the samples in their files, for the kernel that makes batches."""
        ...

    def locate(self, positions: npt.NDArray[np.int64]) -> Draws:
        """Dataset 0 and the number in `layout` of the sample at each of `[B]` positions in `[-R, R)`.

        Raises:
            IndexError: there is no such position; the kernel raises it for layouts of visits.
        """
        ...

    def pieces(self, position: int) -> Pieces:
        """The documents that the sample at a position in `[-R, R)` comes from, empty ones included.

        Raises:
            IndexError: there is no such position.
            CacheError: an index is damaged.
        """
        ...

    def read(self, position: int, *, padding: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`[S + X]` tokens of the sample at a position, filled up with padding, and the documents of its pieces.

        Raises:
            IndexError: there is no such position.
            CacheError: an index is damaged.
            FormatError: the files are shorter than their index says.
        """
        ...
