"""Tests that the keyed permutation is a bijection, and equals its reference at every level and number of threads."""

import threading
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import available_levels, permute, reference

SIZES = st.integers(1, 3_000) | st.integers(1, 2**63 - 1) | st.builds(lambda bits: 2**bits, st.integers(0, 62))
KEYS = st.integers(0, 2**64 - 1)


def images_of(positions, size, key, **options):
    positions = np.asarray(positions, dtype=np.int64)
    images = np.empty_like(positions)
    permute(positions, images, size=size, key=key, **options)
    return images


def is_bijection(images):
    return np.array_equal(np.sort(images), np.arange(len(images)))


@given(SIZES, KEYS, st.data())
@example(size=2**63 - 1, key=2**64 - 1, data=None)
@example(size=1, key=0, data=None)
@example(size=2, key=0, data=None)
def test_every_level_equals_the_reference(size, key, data):
    edges = [0, size // 2, size - 1]
    drawn = data.draw(st.lists(st.integers(0, size - 1), max_size=40)) if data else []
    positions = [*edges, *drawn]
    wanted = [reference.permute(position, size=size, key=key) for position in positions]
    with pytest.MonkeyPatch.context() as patch:
        for level in available_levels():
            patch.setenv("TRACKBED_ISA", level)
            assert images_of(positions, size, key).tolist() == wanted


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_it_is_a_bijection_at_every_size_from_1_to_5000(level, key):
    for size in range(1, 5_001):
        assert is_bijection(images_of(np.arange(size), size, key)), size


def around(bases, largest):
    powers = {base**power for base in bases for power in range(64) if base**power <= largest}
    return sorted({power + offset for power in powers for offset in (-1, 0, 1) if power + offset >= 1})


@pytest.mark.parametrize("size", around((2, 3, 4, 10), 100_000))
def test_it_is_a_bijection_around_powers(level, size):
    assert is_bijection(images_of(np.arange(size), size, 7))


@pytest.mark.slow
@pytest.mark.parametrize("size", around((2, 3, 4, 10), 10_000_000))
def test_it_is_a_bijection_around_powers_up_to_ten_million(size):
    assert is_bijection(images_of(np.arange(size), size, 7))


def test_repeated_positions_of_small_sizes_are_looked_up_in_a_table(level):
    for size in (1, 2, 5, 63, 64, 1023, 1024, 1025):
        positions = np.arange(5 * size + 3) % size
        wanted = [reference.permute(position, size=size, key=3) for position in range(size)]
        assert np.array_equal(images_of(positions, size, 3), np.array(wanted)[positions])


@pytest.mark.parametrize("size", [5, 1_000_003, 2**62 + 1])
def test_threads_do_not_matter_and_images_may_replace_positions(level, size):
    positions = np.random.default_rng(1).integers(0, size, 300_001)
    wanted = images_of(positions, size, 9)
    assert np.array_equal(images_of(positions, size, 9, num_threads=3), wanted)
    permute(positions, positions, size=size, key=9, num_threads=2)
    assert np.array_equal(positions, wanted)


@pytest.mark.parametrize("size", [0, -1, 2**63])
def test_a_size_must_be_positive_and_fit_63_bits(size):
    with pytest.raises(ArgumentError, match=r"size must be in \[1, 2\*\*63\), found"):
        images_of([0], size, 0)


@pytest.mark.parametrize("key", [-1, 2**64])
def test_a_key_must_fit_64_bits(key):
    with pytest.raises(ArgumentError, match=r"seed must be a whole number in \[0, 2\*\*64\), found"):
        images_of([0], 5, key)


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_that_is_not_there_is_named(position):
    with pytest.raises(ArgumentError, match=rf"in \[0, 5\), but positions\[1\] = {position}"):
        images_of([0, position], 5, 0)


@pytest.mark.parametrize(
    ("positions", "images"),
    [
        (np.zeros(3, np.int32), np.zeros(3, np.int64)),
        (np.zeros(3, np.int64), np.zeros(3, np.int32)),
        (np.zeros(3, np.int64), np.zeros(4, np.int64)),
        (np.zeros((3, 1), np.int64), np.zeros((3, 1), np.int64)),
        (np.zeros(6, np.int64)[::2], np.zeros(3, np.int64)),
    ],
)
def test_arrays_must_be_int64_vectors_of_one_length(positions, images):
    with pytest.raises(ArgumentError, match="must be"):
        permute(positions, images, size=5, key=0)


def test_at_least_one_thread_is_needed():
    with pytest.raises(ArgumentError, match="num_threads must be at least 1, found 0"):
        images_of([0], 5, 0, num_threads=0)


def test_the_poll_can_stop_it():
    def poll(done):
        seen.append(done)
        raise InterruptedError

    seen = []
    positions = np.arange(30_000_000)
    with pytest.raises(InterruptedError):
        permute(positions, positions, size=2**40, key=1, poll=poll)
    assert 0 < seen[0] < len(positions)


def test_other_threads_run_meanwhile():
    positions, ticks = np.arange(20_000_000), 0
    worker = threading.Thread(target=permute, args=(positions, positions), kwargs={"size": 2**40, "key": 1})
    worker.start()
    while worker.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 3
