import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed.cli import ckpt
from trackbed.cli.ckpt import compare_tensors

NAN, INF = math.nan, math.inf


def test_the_number_of_elements_and_the_largest_difference_are_found():
    found = compare_tensors(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.5], [3.0, 1.0]]))
    assert found == (2, 3.0)


@pytest.mark.parametrize(
    ("one", "other", "bits", "largest"),
    [
        ([0.0], [-0.0], 1, 0.0),
        ([NAN], [NAN], 0, 0.0),
        ([NAN], [1.0], 1, NAN),
        ([INF], [INF], 0, 0.0),
        ([INF], [-INF], 1, INF),
        ([INF], [1.0], 1, INF),
        ([], [], 0, 0.0),
        ([NAN, 5.0], [0.0, 1.0], 2, NAN),
    ],
)
def test_special_values(one, other, bits, largest):
    found = compare_tensors(torch.tensor(one), torch.tensor(other))
    assert found.num_elements == bits
    assert found.largest == largest or (math.isnan(found.largest) and math.isnan(largest))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int8,
        torch.uint8,
        torch.int64,
    ],
)
def test_every_type_has_differences(dtype):
    assert compare_tensors(torch.tensor([1, 2]).to(dtype), torch.tensor([1, 4]).to(dtype)) == (1, 2.0)


def test_flags_and_scalars():
    assert compare_tensors(torch.tensor([True, False]), torch.tensor([False, False])) == (1, 1.0)
    assert compare_tensors(torch.tensor(3), torch.tensor(5)) == (1, 2.0)


def test_differences_of_large_whole_numbers_are_exact():
    assert compare_tensors(torch.tensor([2**62 + 1]), torch.tensor([2**62])) == (1, 1.0)
    assert compare_tensors(torch.tensor([2**63 - 1]), torch.tensor([-(2**63)])) == (1, float(2**64 - 1))


@pytest.mark.parametrize(("tolerance", "count"), [(0.0, 2), (0.09, 2), (0.11, 1), (0.6, 0), (None, 4)])
def test_a_tolerance_forgives_small_differences(tolerance, count):
    one = torch.tensor([1.0, 2.0, 0.0, NAN], dtype=torch.float64)
    other = torch.tensor([1.1, 2.5, -0.0, -NAN], dtype=torch.float64)
    other[3] = torch.tensor(0x7FF8_0000_0000_0007).view(torch.float64)  # a NaN of other bits
    assert math.isnan(other[3])
    assert compare_tensors(one, other, tolerance=tolerance).num_elements == count


def test_no_tolerance_forgives_a_nan_in_one_of_them():
    assert compare_tensors(torch.tensor([NAN]), torch.tensor([1.0]), tolerance=1e9).num_elements == 1


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=20), st.floats(0, 1e30))
def test_parts_make_no_difference(pairs, tolerance):
    one, other = (torch.tensor([pair[side] for pair in pairs], dtype=torch.float32) for side in (0, 1))
    whole = compare_tensors(one, other, tolerance=tolerance)
    before, ckpt._AT_ONCE = ckpt._AT_ONCE, 3
    try:
        in_parts = compare_tensors(one, other, tolerance=tolerance)
    finally:
        ckpt._AT_ONCE = before
    assert repr(in_parts) == repr(whole)
    wanted = sum(
        not (a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance)
        for a, b in zip(one.tolist(), other.tolist(), strict=True)
    )
    assert whole.num_elements == wanted
