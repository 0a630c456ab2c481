"""Exact sums of squares on a GPU, by a kernel in Triton.

The square of a float32 number m * 2**(e - 150) is the integer m**2 at bit 2 * e of a sum that is counted in units of
2**-300. m**2 has 48 bits, so it touches two neighbouring limbs of 40 bits, to which the kernel adds its two parts.
"""

import contextlib

import torch
import triton
import triton.language as tl

SLOTS = 64
"""Length of a vector of sums: the limbs, of which the lowest is first, and two counts."""
NAN_SLOT = 40
INFINITE_SLOT = 41
_BLOCK = 2048
_PER_PROGRAM = 1 << 16
"""Numbers that a program adds. Each adds less than 2**47 to a limb, so they fit into 63 bits."""


def add_squares(numbers: torch.Tensor, sums: torch.Tensor) -> None:
    """Adds the squares of some numbers, without a wait for the GPU.

    Args:
        numbers: `[N]` contiguous, of float32, bfloat16 or float16.
        sums: `[SLOTS]` int64 on the same device. Limbs grow by less than 2**41 for each 65,536 numbers.
    """
    num_programs = triton.cdiv(numbers.numel(), _PER_PROGRAM)
    if not num_programs:
        return
    is_bfloat16 = numbers.dtype == torch.bfloat16
    # Triton starts a kernel on the current device.
    with torch.cuda.device(numbers.device) if numbers.is_cuda else contextlib.nullcontext():
        _add_squares[(num_programs,)](
            numbers.view(torch.int16) if is_bfloat16 else numbers,
            sums,
            numbers.numel(),
            is_bfloat16=is_bfloat16,
            per_program=_PER_PROGRAM,
            block=_BLOCK,
            nan=NAN_SLOT,
            infinite=INFINITE_SLOT,
        )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_squares(  # type: ignore[no-untyped-def]  # noqa: ANN202
    numbers,  # noqa: ANN001
    sums,  # noqa: ANN001
    count,  # noqa: ANN001
    is_bfloat16: tl.constexpr,
    per_program: tl.constexpr,
    block: tl.constexpr,
    nan: tl.constexpr,
    infinite: tl.constexpr,
):
    places = tl.arange(0, 32)
    total = tl.zeros([32], dtype=tl.int64)
    num_nan = tl.zeros([block], dtype=tl.int32)
    num_infinite = tl.zeros([block], dtype=tl.int32)
    begin = tl.program_id(0).to(tl.int64) * per_program
    for start in range(0, per_program, block):
        offsets = begin + start + tl.arange(0, block)
        loaded = tl.load(numbers + offsets, mask=offsets < count, other=0)
        if is_bfloat16:  # noqa: SIM108  Triton compiles one branch; a bfloat16 is the upper half of a float32
            bits = loaded.to(tl.int32) << 16
        else:
            bits = loaded.to(tl.float32).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 0xFF
        fraction = bits & 0x7FFFFF
        is_special = exponent == 255
        num_nan += (is_special & (fraction != 0)).to(tl.int32)
        num_infinite += (is_special & (fraction == 0)).to(tl.int32)
        mantissa = tl.where(exponent > 0, fraction | 0x800000, fraction)
        mantissa = tl.where(is_special, 0, mantissa).to(tl.int64)
        square = mantissa * mantissa
        bit = 2 * tl.maximum(exponent, 1)
        limb = bit // 40
        shift = (bit - 40 * limb).to(tl.int64)
        # The square is low + 2**24 * high, each of which fits into 62 bits when it is shifted by up to 38.
        low = (square & 0xFFFFFF) << shift
        high = (square >> 24) << shift
        here = (low & 0xFFFFFFFFFF) + ((high & 0xFFFF) << 24)
        above = (low >> 40) + (high >> 16)
        # Numbers of a tensor have similar sizes, so a block touches few limbs.
        first = tl.min(tl.where(square == 0, 31, limb), axis=0)
        last = tl.max(tl.where(square == 0, 0, limb), axis=0) + 1
        for place in range(first, last + 1):
            part = tl.where(limb == place, here, 0) + tl.where(limb + 1 == place, above, 0)
            total += tl.where(places == place, tl.sum(part, axis=0), 0)
    tl.atomic_add(sums + places, total & 0xFFFFFFFFFF)
    tl.atomic_add(sums + places + 1, total >> 40)
    tl.atomic_add(sums + nan, tl.sum(num_nan, axis=0).to(tl.int64))
    tl.atomic_add(sums + infinite, tl.sum(num_infinite, axis=0).to(tl.int64))
