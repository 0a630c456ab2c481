"""The kernel that sums squares exactly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import reference, square_sum

SEEDS = st.integers(0, 2**32)
UNSIGNED = {"float32": np.uint32, "float64": np.uint64, "bfloat16": np.uint16, "float16": np.uint16}
BITS_BEHIND_THE_FIRST = {"float32": 23, "float64": 52, "bfloat16": 7, "float16": 10}


def vector(name, bits):
    """Numbers with these bits, as the kernel takes them."""
    bits = bits.astype(UNSIGNED[name])
    return bits if name == "bfloat16" else bits.view(name)


def floats(name, numbers):
    """The same numbers in a type that NumPy has."""
    return (numbers.astype(np.uint32) << 16).view(np.float32) if name == "bfloat16" else numbers


def make(name, count, seed, *, spread):
    """Finite numbers whose exponents differ by at most `spread`, with some zeros and all digits filled."""
    random = np.random.default_rng(seed)
    width = BITS_BEHIND_THE_FIRST[name]
    total = 8 * UNSIGNED[name](0).itemsize
    highest = {"float32": 254, "float64": 1023 + 127, "bfloat16": 254, "float16": 30}[name]
    first = int(random.integers(0, highest + 1))
    exponents = np.minimum(first + random.integers(0, spread + 1, count), highest).astype(np.uint64)
    bits = exponents << np.uint64(width) | random.integers(0, 2**width, count, dtype=np.uint64)
    bits |= random.integers(0, 2, count, dtype=np.uint64) << np.uint64(total - 1)
    return vector(name, np.where(random.random(count) < 0.1, 0, bits))


def totals(digits):
    """A sum as the reference returns it."""
    *digits, num_nan, num_infinite = digits.tolist()
    assert all(0 <= digit < 2**32 for digit in digits)
    return sum(digit << 32 * place for place, digit in enumerate(digits)), num_nan, num_infinite


def same_as_reference(name, numbers):
    return totals(square_sum(numbers)) == reference.square_sum(floats(name, numbers))


@pytest.mark.parametrize("name", UNSIGNED)
@given(count=st.integers(0, 5000), seed=SEEDS, spread=st.sampled_from([0, 3, 26, 29, 60, 2000]))
def test_a_sum_equals_its_reference(level, name, count, seed, spread):
    assert same_as_reference(name, make(name, count, seed, spread=spread))


@pytest.mark.parametrize("name", UNSIGNED)
@given(count=st.integers(0, 5000), seed=SEEDS)
def test_a_sum_of_any_bits_equals_its_reference(level, name, count, seed):
    random = np.random.default_rng(seed)
    assert same_as_reference(name, vector(name, random.integers(0, 2**64, count, dtype=np.uint64)))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_number_of_16_bits_is_squared(level, name):
    every = np.arange(2**16)
    exponents = {"bfloat16": 0x7F80, "float16": 0x7C00}[name]
    finite = every[every & exponents != exponents]
    assert same_as_reference(name, vector(name, finite))
    for bits in (*range(0, 2**16, 97), exponents, exponents | 1, 0xFFFF):
        assert same_as_reference(name, vector(name, np.array([bits])))


@given(data=st.data(), count=st.integers(1, 9000), seed=SEEDS, name=st.sampled_from(sorted(UNSIGNED)))
def test_sums_do_not_depend_on_the_order_or_on_cuts(data, count, seed, name):
    numbers = make(name, count, seed, spread=data.draw(st.sampled_from([3, 40, 2000])))
    shuffled = np.random.default_rng(seed + 1).permutation(numbers.view(UNSIGNED[name])).view(numbers.dtype)
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=5)))
    parts = [totals(square_sum(part))[0] for part in np.split(shuffled, cuts)]
    assert sum(parts) == totals(square_sum(numbers))[0]


@pytest.mark.parametrize("number", [math.ldexp(odd, -151) for odd in (1, 3, 5, 99)] + [1e-43, 1.1e-40, 7e-46])
def test_squares_of_doubles_are_rounded_one_by_one(level, number):
    alone = totals(square_sum(np.array([number])))[0]
    for other in (1.0, 2.0**-120, 2.0**127):
        beside = totals(square_sum(np.array([number, other, number])))[0]
        assert beside == 2 * alone + totals(square_sum(np.array([other])))[0]


def test_small_squares_of_doubles_are_rounded_to_the_nearest_multiple(level):
    for odd in range(1, 400, 2):  # of a square of odd**2 / 4 units
        assert totals(square_sum(np.array([math.ldexp(odd, -151)])))[0] == round(odd**2 / 4)


def test_a_square_between_two_multiples_is_rounded_to_the_even_one(level):
    squares = {math.ldexp(odd, -301): odd / 2 for odd in range(1, 400, 2)}
    ties = [math.sqrt(square) for square in squares if math.sqrt(square) * math.sqrt(square) == square]
    assert len(ties) > 50
    for number in ties:
        units = round(squares[number * number])
        assert totals(square_sum(np.array([number])))[0] == units
        assert totals(square_sum(np.array([number, 1.0])))[0] == units + 2**300


@pytest.mark.parametrize(
    ("name", "bits"),
    [("float32", 0x7F7FFFFF), ("float64", ((1023 + 128) << 52) - 1), ("bfloat16", 0x7F7F), ("float16", 0x7BFF)],
)
def test_the_largest_numbers_do_not_overflow(level, name, bits):
    count = 3 * 2**18 + 5
    numbers = vector(name, np.full(count, bits, dtype=np.uint64))
    assert totals(square_sum(numbers))[0] == count * reference.square_sum(floats(name, numbers[:1]))[0]


@pytest.mark.parametrize("number", [2.0**128, 1e200, 1e308, -(2.0**128)])
def test_a_double_beyond_float32_counts_as_infinite(level, number):
    assert totals(square_sum(np.array([1.0, number, math.nan, number]))) == (0, 1, 2)
    assert totals(square_sum(np.array([math.nextafter(2.0**128, 0)])))[1:] == (0, 0)


@pytest.mark.parametrize("name", UNSIGNED)
def test_threads_do_not_change_the_sum(name):
    numbers = make(name, 3 * 2**18 + 9, 7, spread=5)
    assert square_sum(numbers, num_threads=3).tobytes() == square_sum(numbers).tobytes()


def test_a_part_of_a_tensor_at_an_odd_place_has_its_own_sum(level):
    numbers = make("float32", 5000, 1, spread=9)
    for start in range(17):
        assert totals(square_sum(numbers[start:]))[0] == reference.square_sum(numbers[start:])[0]


def test_bfloat16_has_the_bits_of_torch():
    tensor = torch.tensor([1.5, -3.0], dtype=torch.bfloat16)
    assert totals(square_sum(tensor.view(torch.int16).numpy().view(np.uint16)))[0] / 2**300 == 11.25


def test_an_exception_of_the_poll_ends_the_sum(monkeypatch):
    monkeypatch.setenv("TRACKBED_ISA", "baseline")  # the slowest: the poll is called after 20 ms

    def stop(done):
        raise KeyboardInterrupt

    numbers = np.ones(2**25, dtype=np.float16)

    def run():
        while True:  # a machine may be so fast that one sum takes less time than a poll
            square_sum(numbers, poll=stop)

    with pytest.raises(KeyboardInterrupt):
        run()


@pytest.mark.parametrize(
    ("numbers", "threads"),
    [
        (np.zeros(3, np.uint32), 1),
        (np.zeros(3, ">f4"), 1),
        (np.zeros((3, 2), np.float32), 1),
        (np.zeros(6, np.float32)[::2], 1),
        (np.zeros(3, np.float32), 0),
    ],
)
def test_other_arrays_are_refused(numbers, threads):
    with pytest.raises(ArgumentError, match="numbers must be a contiguous vector of float32, float64, float16 or"):
        square_sum(numbers, num_threads=threads)
