"""Checksum of lengths, which identifies data in any file."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import check_cancelled
from trackbed.files import crc32

_STRIDE: Final = 1 << 20
"""Lengths per check for cancellation."""


def checksum_lengths(*vectors: npt.NDArray[Any]) -> str:
    """Returns the CRC-32 of vectors of numbers as little-endian int32, in eight hexadecimal digits.

    >>> checksum_lengths(np.array([3, 1, 2])), checksum_lengths(np.array([3, 2, 1]))
    ('6ae8dc8a', 'f6d27487')
    >>> checksum_lengths(np.array([3, 1]), np.array([2]))
    '6ae8dc8a'
    """
    value = 0
    for numbers in vectors:
        for start in range(0, len(numbers), _STRIDE):
            check_cancelled(start)
            value = crc32(np.ascontiguousarray(numbers[start : start + _STRIDE], dtype="<i4").data, value)
    return f"{value:08x}"
