import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.index import InstantOrder
from trackbed.index.prefetch import PrefetchedOrder

ORDER = InstantOrder(sizes=[300, 50, 7], weights=[5, 2, 1], seed=3, num_samples=9000)


def assert_located(prefetched, positions):
    found = prefetched.locate(np.array(positions, dtype=np.int64))
    wanted = ORDER.locate([position % len(ORDER) for position in positions])
    assert [array.tolist() for array in found] == [array.tolist() for array in wanted]
    assert [array.dtype for array in found] == [array.dtype for array in wanted]


@given(st.lists(st.lists(st.integers(-9000, 8999) | st.integers(4000, 4600), max_size=5), max_size=12))
def test_lookups_in_any_sequence_equal_those_of_the_order(batches):
    prefetched = PrefetchedOrder(ORDER)
    for positions in batches:
        assert_located(prefetched, positions)


@pytest.mark.parametrize("step", [1, 3, 8, 100])
def test_sequential_reads_locate_thousands_of_positions_at_once(step, monkeypatch):
    prefetched, located = PrefetchedOrder(ORDER), []
    locate = InstantOrder.locate
    monkeypatch.setattr(InstantOrder, "locate", lambda self, found: located.append(len(found)) or locate(self, found))
    for start in range(0, 9000 - step, step):
        found = prefetched.locate(np.arange(start, start + min(step, 4)))
        assert found[0].tolist() == locate(ORDER, range(start, start + min(step, 4)))[0].tolist()
    assert len(located) <= 4


def test_distant_positions_are_not_prefetched(monkeypatch):
    prefetched, located = PrefetchedOrder(ORDER), []
    locate = InstantOrder.locate
    monkeypatch.setattr(InstantOrder, "locate", lambda self, found: located.append(len(found)) or locate(self, found))
    for start in (8000, 2000, 6000, 4000):
        prefetched.locate(np.arange(start, start + 8))
    assert located == [8, 8, 8, 8]


@pytest.mark.parametrize("wrong", [9000, -9001, 2**62])
def test_a_position_out_of_range_is_an_index_error(wrong):
    with pytest.raises(IndexError, match=rf"a sample must be in \[-9000, 9000\), found {wrong}"):
        PrefetchedOrder(ORDER).locate(np.array([3, wrong]))


def test_a_copy_locates_the_same_positions():
    prefetched = PrefetchedOrder(ORDER)
    prefetched.locate(np.arange(8))
    copy = pickle.loads(pickle.dumps(prefetched))
    assert_located(copy, range(5, 20))
