"""Typed wrapper of the kernel that sums the buffers of all ranks in place.

Shapes: N elements of each buffer.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.isa import chosen_level

_NUMBERS: Final = {"float32": 0, "float64": 1, "uint16": 2, "float16": 3}
_ALL: Final = -1


def sum_ranks(
    buffers: Sequence[npt.NDArray[Any]],
    *,
    start: int,
    stop: int,
    factor: float = 1.0,
    divisor: int = 1,
    owner: int | None = None,
    num_threads: int = 1,
    poll: Callable[[int], object] | None = None,
) -> None:
    """Sums elements [start, stop) of all ranks' buffers in place, in one pass over memory.

    Of n ranks with h = ceil(n / 2), rank r adds rank r + h, then n = h, until one is left: the order of the sum is the
    same for every element. Numbers of 16 bits are added in float32, and the sum is rounded once.

    Args:
        buffers: `[N]` of each rank, in rank order, at least one: float32, float64, float16, or uint16 with the bits of
            bfloat16.
        start: first element to sum, in `[0, N]`.
        stop: element after the last one, in `[start, N]`.
        factor: each number is multiplied by it before the sum, in float32 (float64 for float64), and rounded to its
            type.
        divisor: the sum is divided by it, at least 1.
        owner: rank whose buffer gets the sum, while the others keep their products; None for all ranks.
        num_threads: number of threads, at least 1.
        poll: called every 20 ms or so; an exception of it ends the sum.

    Raises:
        ArgumentError: the buffers are not writable vectors of one length and type, or a number is out of range.
    """
    _check(buffers, start, stop, divisor, owner, num_threads)
    number = _NUMBERS[buffers[0].dtype.name]
    rank = _ALL if owner is None else owner
    arguments = (number, start, stop, factor, divisor, rank, chosen_level(), num_threads, poll)
    _native.sum_ranks(list(buffers), *arguments)


def _check(
    buffers: Sequence[npt.NDArray[Any]], start: int, stop: int, divisor: int, owner: int | None, num_threads: int
) -> None:
    if not buffers:
        raise ArgumentError("buffers must hold at least one buffer, found none")
    first = buffers[0]
    for rank, buffer in enumerate(buffers):
        is_vector = buffer.ndim == 1 and buffer.flags.c_contiguous and buffer.flags.writeable
        is_known = buffer.dtype.name in _NUMBERS and buffer.dtype.isnative
        if not is_vector or not is_known or buffer.dtype != first.dtype or len(buffer) != len(first):
            found = f"{buffer.dtype.str}{list(buffer.shape)} beside {first.dtype.str}{list(first.shape)}"
            raise ArgumentError(
                "buffers must be writable vectors of one length and type (float32, float64, float16 or uint16), "
                f"but buffers[{rank}] is {found}"
            )
    if not 0 <= start <= stop <= len(first):
        raise ArgumentError(f"start and stop must be in order in [0, {len(first)}], but are {start} and {stop}")
    if owner is not None and not 0 <= owner < len(buffers):
        raise ArgumentError(f"owner must be a rank in [0, {len(buffers)}), but is {owner}")
    if divisor < 1 or num_threads < 1:
        raise ArgumentError(f"divisor and num_threads must be at least 1, but are {divisor} and {num_threads}")
