"""Typed wrapper of the kernel that sums squares exactly, by exponent.

Shapes: N numbers, E = 256 exponents.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native

__all__ = ["square_bins"]


def square_bins(
    numbers: npt.NDArray[Any], *, num_threads: int = 1, poll: Callable[[int], object] | None = None
) -> npt.NDArray[np.uint64]:
    """Sums the squares of numbers by their exponent, exactly, so that the result does not depend on their order.

    A number with the exponent bits e has the square mantissa**2 * 2**(2 * max(e, 1) - 300), where the mantissa is an
    integer below 2**24. Infinities and NaNs have the exponent 255.

    Args:
        numbers: `[N]` float32, or uint16 with the bits of bfloat16.
        num_threads: number of threads, at least 1.
        poll: called every 20 ms or so; an exception of it ends the sum.

    Returns:
        `[2, E]` sums of the squares of mantissas: the low 64 bits, and multiples of 2**64.

    Raises:
        ArgumentError: `numbers` is no contiguous vector of such a type, or `num_threads` is below 1.
    """
    is_vector = numbers.ndim == 1 and numbers.flags.c_contiguous and numbers.dtype.isnative
    if not is_vector or numbers.dtype.name not in ("float32", "uint16") or num_threads < 1:
        found = f"{numbers.dtype.str}{list(numbers.shape)} and {num_threads} threads"
        msg = f"numbers must be a contiguous vector of float32 or uint16, with at least 1 thread, found {found}"
        raise ArgumentError(msg)
    bits = numbers.view(np.uint32) if numbers.dtype == np.float32 else numbers
    bins = np.zeros((2, 256), dtype=np.uint64)
    _native.add_squares(bits, bins.reshape(-1), num_threads, poll)
    return bins
