"""The shuffle that Megatron's orders are made of: NumPy's legacy `RandomState`.

Its stream is frozen by NumPy (NEP 19): MT19937 seeded by a scalar, then Fisher-Yates from the end, each target drawn
by masked rejection.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.errors import ArgumentError

__all__ = ["LegacyShuffle", "legacy_shuffle"]


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

    def __call__(self, array: npt.NDArray[np.integer[Any]], *, poll: kernels.Poll = None) -> None:
        """Shuffle a vector of 32- or 64-bit integers in place."""
        kernels.legacy_shuffle(self._twister, array, poll=poll)


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
