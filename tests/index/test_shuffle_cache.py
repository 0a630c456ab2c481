from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed import kernels
from trackbed.index import LegacyShuffle, legacy_random
from trackbed.index.shuffle_cache import Drawn, SharedRuns


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    shared = SharedRuns()
    monkeypatch.setattr(legacy_random, "_SHARED", shared)
    return shared


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 5_000, 5_001, 9_000]), st.integers(0, 2**30)), min_size=1, max_size=4),
    st.sampled_from([np.int32, np.uint32, np.int64]),
    st.sampled_from([0, 7]),
)
def test_runs_are_numpys_however_often_they_are_asked_for(runs, dtype, seed):
    for _ in range(4):
        state = np.random.RandomState(seed)
        shuffle = LegacyShuffle(seed)
        for count, start in runs:
            wanted = np.arange(start, start + count).astype(dtype)
            state.shuffle(wanted)
            found = np.empty(count, dtype=dtype)
            shuffle.run(found, start)
            assert (found == wanted).all()
        after = np.arange(100)
        wanted = after.copy()
        shuffle(after)
        state.shuffle(wanted)
        assert (after == wanted).all()


def test_a_run_is_kept_from_the_second_time_on(nothing_kept):
    key = (1234, 5_000)
    for times in range(1, 4):
        LegacyShuffle(1234).run(np.empty(5_000, dtype=np.int32), 3)
        assert (nothing_kept.find(key) is not None) == (times > 1)


def test_what_does_not_fit_goes_oldest_first():
    shared = SharedRuns(most_bytes=4 * 25)
    twister = kernels.new_twister(0)
    for key in [(0, 10), (1, 10)]:
        shared.keep(key, Drawn(np.arange(10, dtype=np.uint32), twister))
    assert shared.find((0, 10)) is not None
    shared.keep((2, 10), Drawn(np.arange(10, dtype=np.uint32), twister))
    assert [shared.find((seed, 10)) is not None for seed in range(3)] == [True, False, True]
    assert not any(shared.is_wanted((3, 26)) for _ in range(3))


def test_nothing_is_kept_after_a_build(nothing_kept):
    for _ in range(2):
        LegacyShuffle(1234).run(np.empty(5_000, dtype=np.int32), 3)
    legacy_random.forget_shared_runs()
    assert nothing_kept.find((1234, 5_000)) is None
    assert not nothing_kept.is_wanted((1234, 5_000))


def test_threads_share_a_run():
    wanted = np.arange(20_000)
    np.random.RandomState(5).shuffle(wanted)

    def run(start):
        found = np.empty(20_000, dtype=np.int64)
        LegacyShuffle(5).run(found, start)
        return found

    with ThreadPoolExecutor(8) as pool:
        for start, found in enumerate(pool.map(run, range(64))):
            assert (found == wanted + start).all()
