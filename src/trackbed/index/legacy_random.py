"""The shuffle that Megatron's orders are made of: NumPy's legacy `RandomState`.

Its stream is frozen by NumPy (NEP 19): MT19937 seeded by a scalar, then Fisher-Yates from the end, each target drawn
by masked rejection.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.cancellation import Poll
from trackbed.errors import ArgumentError
from trackbed.index.ranges import count_from
from trackbed.index.shuffle_cache import Drawn, SharedRuns

__all__ = ["LegacyShuffle", "forget_shared_runs", "legacy_shuffle"]

_SHARED: Final = SharedRuns()
_FEWEST_SHARED: Final = 1 << 12
"""Fewer are shuffled sooner than they are looked up."""
_MOST_SHARED: Final = 1 << 31


class LegacyShuffle:
    """A stream of shuffles: each one goes on where the one before left the generator.

    Args:
        seed: in `[0, 2**32)`.

    Raises:
        ArgumentError: the seed is outside that range.

    >>> shuffled = np.arange(5, dtype=np.int32)
    >>> LegacyShuffle(1234)(shuffled)
    >>> shuffled.tolist()
    [4, 0, 1, 2, 3]
    """

    def __init__(self, seed: int) -> None:
        self._twister = kernels.new_twister(seed)
        self._drawn: tuple[int, ...] = (int(seed),)
        """The seed, and the count of each shuffle so far."""

    def __call__(self, array: npt.NDArray[np.integer[Any]], *, poll: Poll = None) -> None:
        """Shuffle a vector of 32- or 64-bit integers in place."""
        kernels.legacy_shuffle(self._twister, array, poll=poll)
        self._drawn += (len(array),)

    def run(self, array: npt.NDArray[np.integer[Any]], start: int, *, poll: Poll = None) -> None:
        """Fill a vector with `start`, `start + 1` and so on, shuffled.

        Streams of one seed draw the same for equal counts. What several of them ask for is drawn once.

        >>> shuffled = np.empty(5, dtype=np.int32)
        >>> LegacyShuffle(1234).run(shuffled, 10)
        >>> shuffled.tolist()
        [14, 10, 11, 12, 13]
        """
        key = (*self._drawn, len(array))
        shared = _FEWEST_SHARED <= len(array) < _MOST_SHARED
        drawn = _SHARED.find(key) if shared else None
        if drawn is not None:
            np.add(drawn.order, start, out=array, casting="unsafe", dtype=array.dtype)
            self._twister[:] = drawn.twister
            self._drawn = key
            return
        wanted = shared and _SHARED.is_wanted(key)
        count_from(array, 0 if wanted else start)
        self(array, poll=poll)
        if wanted:
            _SHARED.keep(key, Drawn(array.astype(np.uint32), self._twister.copy()))
            array += start


def legacy_shuffle(array: npt.NDArray[np.integer[Any]], *, seed: int, num_threads: int = 1) -> None:
    """Shuffle a vector in place, as `numpy.random.RandomState(seed).shuffle(array)` does.

    Args:
        array: `[N]` int32, uint32 or int64.
        seed: in `[0, 2**32)`.
        num_threads: at least 1. One swap follows from the one before, so more than one are of no use yet.

    Raises:
        ArgumentError: an argument is out of range, or `array` cannot be written in place.

    >>> shuffled = np.arange(5)
    >>> legacy_shuffle(shuffled, seed=1234)
    >>> shuffled.tolist()
    [4, 0, 1, 2, 3]
    """
    if num_threads < 1:
        msg = f"num_threads must be at least 1, found {num_threads}"
        raise ArgumentError(msg)
    LegacyShuffle(seed)(array)


def forget_shared_runs() -> None:
    """Give back the memory of what streams shared, at the end of a build."""
    _SHARED.clear()
