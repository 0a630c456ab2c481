"""A cast is exact if and only if each value comes back."""

import pytest
import torch

from trackbed.checkpoint.load import is_exact_cast

INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [*INTEGERS, *FLOATS, torch.complex64, torch.complex128]


def extremes(dtype):
    """All values of a type of up to 16 bits, and those of a larger one at the ends of its range and precision."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    elif dtype.itemsize == 2:
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    elif dtype.is_floating_point:
        found = torch.finfo(dtype)
        values = torch.tensor([found.max, found.min, 1 + found.eps, found.smallest_normal * found.eps], dtype=dtype)
    else:
        found = torch.iinfo(dtype)
        values = torch.tensor([found.max, found.min, found.max - 1, found.max // 2], dtype=dtype)
    if dtype.is_floating_point:
        wide = values.double()
        kept = values.view(torch.uint8).view(len(values), -1)[wide.isfinite()]  # torch 2.9 has no index of 8-bit floats
        values = kept.view(-1).view(dtype)
    return values


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("source", [*INTEGERS, *FLOATS, *EIGHT_BITS])
def test_a_cast_is_exact_if_all_values_come_back(source, target):
    values = extremes(source)
    there = values.to(target)
    if target.is_complex:
        there = there.real
    # Numbers of 64 bits have no exact double; Python's compare exactly.
    is_long = source == torch.int64
    keeps = values.tolist() == there.tolist() if is_long else torch.equal(values.double(), there.double())
    assert is_exact_cast(source, target) == keeps


def test_complex_numbers_are_no_real_ones():
    assert is_exact_cast(torch.complex64, torch.complex128)
    assert not is_exact_cast(torch.complex128, torch.complex64)
    assert not is_exact_cast(torch.complex64, torch.float64)
