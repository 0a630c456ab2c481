"""Streams of 64-bit words with random access: SplitMix64 (Steele, Lea and Flood, 2014).

All arithmetic is in integers, so the words are equal on every platform; they are part of the contract of the orders.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

_STEP: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB


def split_mix(start: int, number: int) -> int:
    """Word `number` of the stream that starts at `start`, counted from 0; both are taken modulo 2**64.

    >>> hex(split_mix(0, 0))
    '0xe220a8397b1dcdaf'
    """
    word = start + _STEP * (number + 1) & 2**64 - 1
    word = (word ^ word >> 30) * _FIRST & 2**64 - 1
    word = (word ^ word >> 27) * _SECOND & 2**64 - 1
    return word ^ word >> 31


def split_mix_words(start: int, count: int) -> npt.NDArray[np.uint64]:
    """`[count]` first words of the stream that starts at `start`, with `start` in `[0, 2**64)`.

    >>> [hex(word) for word in split_mix_words(0, 2).tolist()]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(start)
    word = (word ^ word >> np.uint64(30)) * np.uint64(_FIRST)
    word = (word ^ word >> np.uint64(27)) * np.uint64(_SECOND)
    return np.asarray(word ^ word >> np.uint64(31))
