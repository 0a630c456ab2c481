"""Typed wrapper of the kernel that sums squares exactly.

Shapes: N numbers, K = 22 integers of a sum.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.isa import chosen_level

_NUMBERS: Final = {"float32": 0, "float64": 1, "uint16": 2, "float16": 3}


def square_sum(
    numbers: npt.NDArray[Any], *, num_threads: int = 1, poll: Callable[[int], object] | None = None
) -> npt.NDArray[np.int64]:
    """Sums the squares of numbers exactly, so that the result does not depend on their order.

    The square of a float64 number is rounded to float64 and then to a multiple of 2**-300, ties to even; a float64
    number from 2**128 on counts as infinite.

    Args:
        numbers: `[N]` float32, float64, float16, or uint16 with the bits of bfloat16.
        num_threads: number of threads, at least 1.
        poll: called every 20 ms or so; an exception of it ends the sum.

    Returns:
        `[K]` the sum in multiples of 2**-300, as digits of 32 bits, lowest first; then the number of NaNs and of
        infinities. The digits are zero if one of these is not.

    Raises:
        ArgumentError: `numbers` is no contiguous vector of such a type, or `num_threads` is below 1.

    >>> square_sum(np.array([3.0, 4.0]))[[9, -2, -1]] // 2**12
    array([25,  0,  0])
    """
    is_vector = numbers.ndim == 1 and numbers.flags.c_contiguous and numbers.dtype.isnative
    if not is_vector or numbers.dtype.name not in _NUMBERS or num_threads < 1:
        found = f"{numbers.dtype.str}{list(numbers.shape)} and {num_threads} threads"
        raise ArgumentError(
            "numbers must be a contiguous vector of float32, float64, float16 or uint16, with at least 1 thread, "
            f"found {found}"
        )
    total = np.zeros(_native.SQUARE_SUM_SIZE, dtype=np.int64)
    _native.square_sum(numbers, _NUMBERS[numbers.dtype.name], total, chosen_level(), num_threads, poll)
    return total
