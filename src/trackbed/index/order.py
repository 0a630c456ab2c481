"""What every order can say: which sample comes k-th.

Shapes: K datasets, N positions.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = ["Order"]


@runtime_checkable
class Order(Protocol):
    """A rule that says which sample comes at which position, whoever asks, and in whatever sequence."""

    def __len__(self) -> int:
        """Positions that the order was made for."""
        ...

    def locate(
        self, positions: Sequence[int] | npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
        """`[N]` dataset and `[N]` sample of that dataset at each of `[N]` positions."""
        ...

    def counts_before(self, position: int) -> npt.NDArray[np.int64]:
        """`[K]` samples that each dataset gives before a position."""
        ...
