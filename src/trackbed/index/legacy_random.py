"""The shuffle of Megatron's orders: that of NumPy's legacy `RandomState`.

NumPy froze its stream (NEP 19): MT19937 seeded by a scalar, then Fisher-Yates from the end, with each target drawn by
masked rejection.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.cancellation import Poll
from trackbed.errors import ArgumentError
from trackbed.index.ranges import count_from
from trackbed.index.shuffle_cache import CachedShuffle, ShuffleCache

_CACHE: Final = ShuffleCache()
_FEWEST_CACHED: Final = 1 << 12
"""Smaller ranges are shuffled faster than they are looked up."""
_MOST_CACHED: Final = 1 << 22
"""Larger ones are shuffled together with the lengths of documents faster than these are looked up afterwards."""


class LegacyShuffle:
    """A stream of shuffles: each one continues from the generator state that the previous one left.

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
        """The seed, followed by the length of each shuffle so far."""

    def __call__(self, array: npt.NDArray[np.integer[Any]], *, poll: Poll = None) -> None:
        """Shuffle a vector of 32- or 64-bit integers in place."""
        kernels.legacy_shuffle(self._twister, array, poll=poll)
        self._drawn += (len(array),)

    def is_shared(self, count: int) -> bool:
        """True if a range of this length was requested before at this state, of any stream. Records the request."""
        return _FEWEST_CACHED <= count < _MOST_CACHED and _CACHE.is_wanted((*self._drawn, count))

    def fill_range(self, array: npt.NDArray[np.integer[Any]], start: int, *, poll: Poll = None) -> None:
        """Fills a vector with `start`, `start + 1` and so on, shuffled.

        Streams of equal seed draw the same permutation for equal lengths; repeated ones are served from a cache.

        >>> shuffled = np.empty(5, dtype=np.int32)
        >>> LegacyShuffle(1234).fill_range(shuffled, 10)
        >>> shuffled.tolist()
        [14, 10, 11, 12, 13]
        """
        key = (*self._drawn, len(array))
        cached = _CACHE.find(key)
        if cached is not None:
            np.add(cached.order, start, out=array, casting="unsafe", dtype=array.dtype)
            self._twister[:] = cached.twister
            self._drawn = key
            return
        wanted = self.is_shared(len(array))
        count_from(array, 0 if wanted else start)
        self(array, poll=poll)
        if wanted:
            _CACHE.keep(key, CachedShuffle(array.astype(np.uint32), self._twister.copy()))
            array += start


def legacy_shuffle(array: npt.NDArray[np.integer[Any]], *, seed: int, num_threads: int = 1) -> None:
    """Shuffle a vector in place, as `numpy.random.RandomState(seed).shuffle(array)` does.

    Args:
        array: `[N]` int32, uint32 or int64.
        seed: in `[0, 2**32)`.
        num_threads: at least 1. Each swap depends on the one before, so additional threads are not used yet.

    Raises:
        ArgumentError: an argument is out of range, or `array` cannot be written in place.

    >>> shuffled = np.arange(5)
    >>> legacy_shuffle(shuffled, seed=1234)
    >>> shuffled.tolist()
    [4, 0, 1, 2, 3]
    """
    if num_threads < 1:
        raise ArgumentError(f"num_threads must be at least 1, found {num_threads}")
    LegacyShuffle(seed)(array)


def clear_shuffle_cache() -> None:
    """Free the memory of cached shuffles, at the end of a build."""
    _CACHE.clear()
