"""The interface of every order: the sample at a position, and counts of samples before a position.

Shapes: K datasets, N positions.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt


@runtime_checkable
class Order(Protocol):
    """A deterministic map from positions to samples, independent of the process and of the sequence of lookups."""

    def __len__(self) -> int:
        """Number of positions that the order is defined for."""
        ...

    def locate(
        self, positions: Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
        """`[N]` dataset and `[N]` sample of that dataset at each of `[N]` positions."""
        ...

    def counts_before(self, position: int) -> npt.NDArray[np.int64]:
        """`[K]` number of samples drawn from each dataset before a position."""
        ...
