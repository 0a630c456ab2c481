"""The kernel that sums squares exactly, by exponent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import reference, square_bins

SEEDS = st.integers(0, 2**32)


def any_bits(count, seed, dtype=np.uint32):
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, count, dtype=dtype, endpoint=True)


def totals(bins):
    return [low + (high << 64) for low, high in zip(*bins.tolist(), strict=True)]


@given(count=st.integers(0, 1200), seed=SEEDS)
def test_bins_equal_their_reference_for_any_bits(count, seed):
    numbers = any_bits(count, seed).view(np.float32)
    assert totals(square_bins(numbers)) == reference.square_bins(numbers)


@given(count=st.integers(0, 1200), seed=SEEDS)
def test_bfloat16_has_the_bins_of_the_same_numbers_in_float32(count, seed):
    bits = any_bits(count, seed, np.uint16)
    same = (bits.astype(np.uint32) << 16).view(np.float32)
    assert totals(square_bins(bits)) == reference.square_bins(same)


@given(data=st.data(), count=st.integers(1, 3000), seed=SEEDS)
def test_bins_do_not_depend_on_the_order_or_on_cuts(data, count, seed):
    numbers = any_bits(count, seed).view(np.float32)
    shuffled = np.random.default_rng(seed + 1).permutation(numbers.view(np.uint32)).view(np.float32)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    parts = [totals(square_bins(part)) for part in np.split(shuffled, cuts)]
    assert [sum(column) for column in zip(*parts, strict=True)] == totals(square_bins(numbers))


@pytest.mark.parametrize("exponent", [0, 1, 127, 254, 255])
def test_sums_of_the_largest_squares_carry_into_the_high_bits(exponent):
    count = 3 * 2**18 + 5
    numbers = np.full(count, (exponent << 23) | 0x7FFFFF, dtype=np.uint32).view(np.float32)
    wanted = [0] * 256
    wanted[exponent] = count * (0x7FFFFF + (0x800000 if exponent else 0)) ** 2
    assert wanted[127] == 0 or wanted[127] > 2**64
    assert totals(square_bins(numbers)) == wanted


@pytest.mark.parametrize("dtype", [np.uint32, np.uint16])
def test_threads_do_not_change_the_bins(dtype):
    numbers = any_bits(3 * 2**20 + 9, 7, dtype)
    numbers = numbers.view(np.float32) if dtype == np.uint32 else numbers
    assert square_bins(numbers, num_threads=3).tobytes() == square_bins(numbers).tobytes()


def test_an_exception_of_the_poll_ends_the_sum():
    def stop(done):
        raise KeyboardInterrupt

    numbers = np.zeros(2**24, dtype=np.float32)

    def run():
        while True:  # a machine may be so fast that one sum takes less time than a poll
            square_bins(numbers, poll=stop)

    with pytest.raises(KeyboardInterrupt):
        run()


@pytest.mark.parametrize(
    ("numbers", "threads"),
    [
        (np.zeros(3), 1),
        (np.zeros(3, np.uint32), 1),
        (np.zeros(3, ">f4"), 1),
        (np.zeros((3, 2), np.float32), 1),
        (np.zeros(6, np.float32)[::2], 1),
        (np.zeros(3, np.float32), 0),
    ],
)
def test_other_arrays_are_refused(numbers, threads):
    with pytest.raises(ArgumentError, match="numbers must be a contiguous vector of float32 or uint16"):
        square_bins(numbers, num_threads=threads)
