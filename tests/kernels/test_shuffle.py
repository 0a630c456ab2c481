"""Tests of the legacy shuffle against NumPy's, at every instruction level."""

import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import legacy_shuffle, new_twister, reference

DTYPES = (np.int32, np.uint32, np.int64, np.uint64)
AROUND_POWERS = [2**power + offset for power in range(21) for offset in (-1, 0, 1) if 2**power + offset <= 1_000_000]


def both(size, seed, dtype):
    ours, theirs = np.arange(size, dtype=dtype), np.arange(size, dtype=dtype)
    legacy_shuffle(new_twister(seed), ours)
    np.random.RandomState(seed).shuffle(theirs)
    return ours, theirs


@pytest.mark.parametrize("size", [0, *AROUND_POWERS, 1_000_000])
def test_sizes_around_powers_of_two(level, size):
    ours, theirs = both(size, 1234, np.int32)
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_types_and_seeds(level, dtype, seed):
    ours, theirs = both(100_003, seed, dtype)
    assert np.array_equal(ours, theirs)


@given(st.integers(0, 20_000), st.integers(0, 2**32 - 1), st.sampled_from(DTYPES))
def test_equals_numpy(size, seed, dtype):
    ours, theirs = both(size, seed, dtype)
    assert np.array_equal(ours, theirs)


@given(st.lists(st.integers(0, 2_000), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_shuffle_continues_from_the_state_of_the_previous_one(sizes, seed):
    twister, theirs, of_reference = new_twister(seed), np.random.RandomState(seed), np.random.RandomState(seed)
    for size in sizes:
        arrays = [np.arange(size, dtype=np.int64) for _ in range(3)]
        legacy_shuffle(twister, arrays[0])
        theirs.shuffle(arrays[1])
        reference.legacy_shuffle(of_reference, arrays[2])
        assert np.array_equal(arrays[0], arrays[1])
        assert np.array_equal(arrays[0], arrays[2])


@pytest.mark.parametrize(
    "array", [np.zeros((2, 2), np.int32), np.zeros(4, np.int16), np.zeros(4), np.zeros(8, np.int32)[::2]]
)
def test_arrays_that_cannot_be_shuffled_in_place_are_refused(array):
    with pytest.raises(ArgumentError, match="must be a"):
        legacy_shuffle(new_twister(1), array)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_must_fit_32_bits(seed):
    with pytest.raises(ArgumentError, match=r"in \[0, 2\*\*32\), found"):
        new_twister(seed)


@pytest.mark.parametrize("twister", [np.zeros(624, np.uint32), np.full(625, 625, np.uint32)])
def test_a_state_must_be_whole(twister):
    with pytest.raises(ArgumentError, match="624 words"):
        legacy_shuffle(twister, np.arange(4))


def test_the_poll_sees_progress_and_can_stop_it():
    seen = []

    def poll(done):
        seen.append((time.monotonic(), done))
        if len(seen) == 4:
            raise InterruptedError

    array = np.arange(50_000_000, dtype=np.int32)
    with pytest.raises(InterruptedError):
        legacy_shuffle(new_twister(1), array, poll=poll)
    assert [done for _, done in seen] == sorted(done for _, done in seen)
    assert 0 < seen[0][1] < len(array)
    # The median interval between polls is below 50 ms even on a busy machine.
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(seen)]
    assert sorted(gaps)[len(gaps) // 2] < 0.05


def test_other_threads_run_meanwhile():
    array, ticks = np.arange(10_000_000, dtype=np.int32), 0
    worker = threading.Thread(target=legacy_shuffle, args=(new_twister(1), array))
    worker.start()
    while worker.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 3
