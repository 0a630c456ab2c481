"""Conversions of types that keep all values."""

from functools import lru_cache

import torch

_INTEGERS = (
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)
_BITS_OF_INTEGERS = {torch.bool: 1} | {
    dtype: torch.iinfo(dtype).bits - int(torch.iinfo(dtype).min < 0) for dtype in _INTEGERS
}
"""Bits of the largest value of each type."""


@lru_cache
def is_exact_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """True if the second type has all values of the first.

    >>> is_exact_cast(torch.bfloat16, torch.float32), is_exact_cast(torch.int64, torch.float32)
    (True, False)
    """
    if source == target:
        return True
    if target.is_complex:
        return is_exact_cast(_part_of(source), _part_of(target))
    if source in _BITS_OF_INTEGERS and target in _BITS_OF_INTEGERS:
        is_signed = source.is_signed and source != torch.bool
        return _BITS_OF_INTEGERS[source] <= _BITS_OF_INTEGERS[target] and (target.is_signed or not is_signed)
    if not target.is_floating_point:
        return False
    wide = torch.finfo(target)
    if source in _BITS_OF_INTEGERS:
        bits = _BITS_OF_INTEGERS[source]
        return 2.0**-bits * 2 >= wide.eps and 2.0**bits <= wide.max
    if not source.is_floating_point:
        return False
    narrow = torch.finfo(source)
    return (
        narrow.eps >= wide.eps
        and narrow.max <= wide.max
        and narrow.smallest_normal * narrow.eps >= wide.smallest_normal * wide.eps
    )


def _part_of(dtype: torch.dtype) -> torch.dtype:
    """Type of the real part."""
    return dtype.to_real()
