from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed import kernels
from trackbed.index import LegacyShuffle, legacy_random
from trackbed.index.shuffle_cache import CachedShuffle, ShuffleCache


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch):
    cache = ShuffleCache()
    monkeypatch.setattr(legacy_random, "_CACHE", cache)
    return cache


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 5_000, 5_001, 9_000]), st.integers(0, 2**30)), min_size=1, max_size=4),
    st.sampled_from([np.int32, np.uint32, np.int64]),
    st.sampled_from([0, 7]),
)
def test_shuffled_ranges_equal_numpys_however_often_they_are_requested(ranges, dtype, seed):
    for _ in range(4):
        state = np.random.RandomState(seed)
        shuffle = LegacyShuffle(seed)
        for count, start in ranges:
            wanted = np.arange(start, start + count).astype(dtype)
            state.shuffle(wanted)
            found = np.empty(count, dtype=dtype)
            shuffle.fill_range(found, start)
            assert (found == wanted).all()
        after = np.arange(100)
        wanted = after.copy()
        shuffle(after)
        state.shuffle(wanted)
        assert (after == wanted).all()


def test_a_shuffle_is_cached_at_the_second_request(empty_cache):
    key = (1234, 5_000)
    for times in range(1, 4):
        LegacyShuffle(1234).fill_range(np.empty(5_000, dtype=np.int32), 3)
        assert (empty_cache.find(key) is not None) == (times > 1)


def test_the_least_recently_used_shuffle_is_evicted_first():
    cache = ShuffleCache(most_bytes=4 * 25)
    twister = kernels.new_twister(0)
    for key in [(0, 10), (1, 10)]:
        cache.keep(key, CachedShuffle(np.arange(10, dtype=np.uint32), twister))
    assert cache.find((0, 10)) is not None
    cache.keep((2, 10), CachedShuffle(np.arange(10, dtype=np.uint32), twister))
    assert [cache.find((seed, 10)) is not None for seed in range(3)] == [True, False, True]
    assert not any(cache.is_wanted((3, 26)) for _ in range(3))


def test_clearing_the_cache_removes_shuffles_and_recorded_keys(empty_cache):
    for _ in range(2):
        LegacyShuffle(1234).fill_range(np.empty(5_000, dtype=np.int32), 3)
    legacy_random.clear_shuffle_cache()
    assert empty_cache.find((1234, 5_000)) is None
    assert not empty_cache.is_wanted((1234, 5_000))


def test_threads_share_a_cached_shuffle():
    wanted = np.arange(20_000)
    np.random.RandomState(5).shuffle(wanted)

    def shuffled_range(start):
        found = np.empty(20_000, dtype=np.int64)
        LegacyShuffle(5).fill_range(found, start)
        return found

    with ThreadPoolExecutor(8) as pool:
        for start, found in enumerate(pool.map(shuffled_range, range(64))):
            assert (found == wanted + start).all()
