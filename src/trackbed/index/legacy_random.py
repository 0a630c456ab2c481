"""The shuffle that Megatron's orders are made of: NumPy's legacy `RandomState`.

The only place where it appears. Its stream is frozen by NumPy (NEP 19): MT19937 seeded by a scalar, then
Fisher-Yates from the end, each target drawn by masked rejection.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError

__all__ = ["LegacyShuffle"]


_IDLE: Final[list[np.random.RandomState]] = []
"""Generators that nobody uses: to make one takes 200 us, to seed one 10, and a blend may need thousands."""


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
        if not 0 <= seed < 2**32:
            msg = f"random_seed must be in [0, 2**32), found {seed}"
            raise ArgumentError(msg)
        self._state = _IDLE.pop() if _IDLE else np.random.RandomState(seed)
        self._state.seed(seed)

    def __del__(self) -> None:
        if hasattr(self, "_state"):
            _IDLE.append(self._state)

    def __call__(self, array: npt.NDArray[Any]) -> None:
        """Shuffle a vector in place."""
        self._state.shuffle(array)
