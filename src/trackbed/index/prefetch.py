"""Prefetching lookups in an instant order, for callers that read it a few positions at a time.

Shapes: N positions.
"""

from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.index.instant import InstantOrder

_PREFETCHED: Final = 4096
_NEAR: Final = 512


class _Block(NamedTuple):
    """Datasets and samples at positions `[start, stop)`."""

    start: int
    stop: int
    datasets: npt.NDArray[np.int32]
    samples: npt.NDArray[np.int64]


class PrefetchedOrder:
    """An order whose positions are located thousands at a time when they are read in sequence.

    A lookup takes as long for one position as for a hundred. Thread-safe; a copy starts without prefetched positions.

    Args:
        order: the order.
        has_visits: True to return visits, as `InstantOrder.locate_visits`, in the place of samples.

    >>> order = InstantOrder(sizes=[3, 2], weights=[0.75, 0.25], seed=1, num_samples=8)
    >>> prefetched = PrefetchedOrder(order)
    >>> [prefetched.locate(np.array([k]))[0].item() for k in range(8)], order.locate(range(8))[0].tolist()
    ([0, 1, 0, 0, 0, 1, 0, 0], [0, 1, 0, 0, 0, 1, 0, 0])
    """

    def __init__(self, order: InstantOrder, *, has_visits: bool = False) -> None:
        self._order = order
        self._has_visits = has_visits
        self._block = _Block(0, 0, np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64))
        self._last = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies the order without the prefetched positions."""
        return partial(type(self), has_visits=self._has_visits), (self._order,)

    def locate(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """`[N]` dataset and `[N]` sample of that dataset at each of `[N]` positions in `[-len, len)`.

        Raises:
            IndexError: there is no such position.
        """
        wanted = positions.tolist()
        if not wanted:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
        first, last = min(wanted), max(wanted)
        if first < 0 or last >= len(self._order):
            return self._locate(self._from_the_start(positions))
        block, is_next = self._block, -_NEAR < first - self._last < _NEAR and last - first < _NEAR
        self._last = last
        if not (block.start <= first and last < block.stop):
            if not is_next:
                return self._locate(positions)
            stop = min(first + _PREFETCHED, len(self._order))
            block = self._block = _Block(first, stop, *self._locate(np.arange(first, stop, dtype=np.int64)))
        if wanted == list(range(first, last + 1)):
            part = slice(first - block.start, last + 1 - block.start)
            return block.datasets[part], block.samples[part]
        places = positions - block.start
        return block.datasets[places], block.samples[places]

    def _locate(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        order = self._order
        return order.locate_visits(positions) if self._has_visits else order.locate(positions)

    def _from_the_start(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions counted from the start; negative ones count from the end."""
        size = len(self._order)
        found = np.where(positions < 0, positions + size, positions)
        wrong = positions[(found < 0) | (found >= size)]
        if len(wrong):
            raise IndexError(f"a sample must be in [-{size}, {size}), found {wrong[0]}")
        return found
