"""Norm of gradients: the same bits however they are cut, ordered and distributed."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed.optim import global_norm
from trackbed.optim.norm import SquareSum

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def spread(count, seed, low=-18.0, high=18.0):
    """Numbers of both signs, from 1e-18 to 1e18 unless stated."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(10 ** random.uniform(low, high, count) * random.choice([-1, 1], count)).float()


def exact_square(tensor):
    return sum((Fraction(value) ** 2 for value in tensor.double().flatten().tolist()), Fraction(0))


def rounded_root(square):
    """The square root of a fraction, rounded to the nearest float, ties to even."""
    if square == 0:
        return 0.0
    scale = 2 * max(0, 120 - (square.numerator // square.denominator).bit_length()) + 400
    scaled = square * (1 << scale)
    root = math.isqrt(scaled.numerator // scaled.denominator)
    return float(Fraction(2 * root + (root * root != scaled), 1 << (scale // 2 + 1)))


@given(count=st.integers(0, 400), seed=st.integers(0, 2**32), low=st.floats(-18, 18), dtype=st.sampled_from(DTYPES[:3]))
def test_the_norm_is_rounded_correctly(count, seed, low, dtype):
    tensor = spread(count, seed, low=min(low, 4 if dtype == torch.float16 else 18)).to(dtype)
    tensor = tensor[torch.isfinite(tensor)]
    assert global_norm([tensor]) == rounded_root(exact_square(tensor))


@given(count=st.integers(1, 400), seed=st.integers(0, 2**32), dtype=st.sampled_from(DTYPES))
def test_the_norm_is_off_by_at_most_4e_16(count, seed, dtype):
    tensor = spread(count, seed).to(dtype)
    tensor = tensor[torch.isfinite(tensor)]
    square = exact_square(tensor)
    found = Fraction(global_norm([tensor])) ** 2
    assert abs(found - square) <= square * Fraction(8, 10**16)  # of the square: twice as much as of the norm


@given(data=st.data(), count=st.integers(1, 600), seed=st.integers(0, 2**32), dtype=st.sampled_from(DTYPES))
def test_the_norm_has_the_same_bits_for_any_cut_and_order(data, count, seed, dtype):
    tensor = spread(count, seed, high=4 if dtype == torch.float16 else 18).to(dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=6)))
    pieces = list(torch.tensor_split(tensor[torch.from_numpy(np.random.default_rng(seed).permutation(count))], cuts))
    assert global_norm(data.draw(st.permutations(pieces))) == global_norm([tensor])


@given(ranks=st.integers(1, 9), seed=st.integers(0, 2**32), dtype=st.sampled_from(DTYPES))
def test_the_norm_has_the_same_bits_on_any_number_of_ranks(ranks, seed, dtype):
    tensor = spread(500, seed, high=4 if dtype == torch.float16 else 18).to(dtype)
    rows = np.stack([SquareSum.of([tensor[rank::ranks]]).numbers() for rank in range(ranks)])
    assert SquareSum.total(rows).norm() == global_norm([tensor])


def test_numbers_of_many_ranks_do_not_overflow():
    one = SquareSum.of([torch.full((1000,), torch.finfo(torch.float32).max)])
    rows = np.broadcast_to(one.numbers(), (1 << 20, len(one.numbers())))
    assert SquareSum.total(rows) == SquareSum(one.units << 20)


@pytest.mark.parametrize("size", [0, 1, 5, 1 << 20])
def test_the_order_of_a_long_tensor_does_not_matter(size):
    tensor = spread(size, 3)
    assert global_norm([tensor]) == global_norm([tensor.flip(0)]) == global_norm(iter(tensor.split(77_777)))


def test_a_norm_of_nothing_is_zero():
    assert global_norm([]) == global_norm([torch.zeros(0)]) == global_norm([torch.zeros(3, 4)]) == 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_with_gaps_and_any_shape_have_the_norm_of_their_elements(dtype):
    block = spread(24, 1, low=-2, high=2).to(dtype).view(4, 6)
    assert global_norm([block[:, ::2]]) == global_norm([block[:, ::2].contiguous()])
    assert global_norm([block.t()]) == global_norm([block])
    assert global_norm([block[0, 0]]) == abs(block[0, 0].item())
    assert global_norm([torch.nn.Parameter(block)]) == global_norm([block])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("others", [[], [1.0, -2.0]])
def test_an_infinity_makes_the_norm_infinite_and_a_nan_makes_it_nan(dtype, others):
    infinite = torch.tensor([*others, -math.inf], dtype=dtype)
    nan = torch.tensor([math.nan, *others], dtype=dtype)
    assert global_norm([infinite, torch.ones(2)]) == math.inf
    assert math.isnan(global_norm([infinite, nan]))
    assert math.isnan(global_norm([nan, infinite]))
    rows = np.stack([SquareSum.of([tensor]).numbers() for tensor in (infinite, torch.ones(1), infinite)])
    assert SquareSum.total(rows).norm() == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_and_the_largest_number_are_their_own_norms(dtype):
    limits = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    smallest = 2.0**-120 if dtype == torch.float64 else limits.smallest_normal * limits.eps
    for value in (smallest, limits.eps, limits.max):
        assert global_norm([torch.tensor([value], dtype=dtype)]) == value


def test_doubles_out_of_the_range_of_float32_have_a_norm_that_no_cut_changes():
    tiny = torch.from_numpy(10 ** np.random.default_rng(1).uniform(-50, -35, 300))
    assert global_norm([tiny]) == global_norm(tiny.split(1)) == global_norm([tiny.flip(0)])
    huge = torch.tensor([1.0, 2.0**128], dtype=torch.float64)
    assert global_norm([huge]) == SquareSum.total(SquareSum.of([huge]).numbers()[np.newaxis]).norm() == math.inf


def test_bfloat16_and_float16_have_the_norm_of_the_same_numbers_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        tensor = spread(1000, 5, low=-7, high=4).to(dtype)
        assert global_norm([tensor]) == global_norm([tensor.float()])
