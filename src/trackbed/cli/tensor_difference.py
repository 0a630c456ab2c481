"""Differences between the elements of two tensors."""

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    import torch


_AT_ONCE: Final = 1 << 22
"""Elements that are compared together, which bounds the memory of their differences."""


class Difference(NamedTuple):
    """Elements in which two tensors differ."""

    num_elements: int
    """Number of elements that differ."""
    largest: float | None
    """Largest difference of two elements; NaN if only one of them is NaN, None if their type has no differences."""


def compare_tensors(one: "torch.Tensor", other: "torch.Tensor", *, tolerance: float | None = None) -> Difference:
    """Returns the elements that differ in their bits, or with `tolerance` by more than that.

    Args:
        one: a tensor.
        other: a tensor of the same shape and type.
        tolerance: largest absolute difference that counts as none, at least 0; then NaN is equal to NaN.
    """
    count, largest = 0, 0.0
    is_known = True
    first, second = one.reshape(-1), other.reshape(-1)
    for start in range(0, first.numel(), _AT_ONCE):
        found = _compare_part(first[start : start + _AT_ONCE], second[start : start + _AT_ONCE], tolerance)
        count += found.num_elements
        if found.largest is None:
            is_known = False
        elif not found.largest <= largest and largest == largest:  # a NaN stays
            largest = found.largest
    return Difference(count, largest if is_known else None)


def _compare_part(one: "torch.Tensor", other: "torch.Tensor", tolerance: float | None) -> Difference:
    import torch

    differs = (one.view(torch.uint8) != other.view(torch.uint8)).view(one.numel(), -1).any(dim=1)
    if not bool(differs.any()):
        return Difference(0, 0.0)
    count = int(differs.sum())
    with contextlib.suppress(RuntimeError):  # some types cannot be converted
        distances = _distances(one[differs], other[differs])
        if tolerance is not None:
            count = int((~(distances <= tolerance)).sum())
        is_nan = bool(distances.isnan().any())
        return Difference(count, float("nan") if is_nan else float(distances.max()))
    return Difference(count, None)


def _distances(one: "torch.Tensor", other: "torch.Tensor") -> "torch.Tensor":
    """Returns the absolute differences as doubles: 0 for two NaNs, NaN for one."""
    import torch

    if one.is_complex() or one.is_floating_point():
        kind = torch.complex128 if one.is_complex() else torch.float64
        a, b = one.to(kind), other.to(kind)
        found = (a - b).abs()
    else:
        # Whole numbers are subtracted as such: doubles would lose the last digits of large ones.
        a, b = one.to(torch.int64), other.to(torch.int64)
        found = (torch.maximum(a, b) - torch.minimum(a, b)).double()
        found = torch.where(found < 0, found + 2.0**64, found)  # more than fits into the type
    return torch.where((a.isnan() & b.isnan()) | (a == b), 0.0, found)
