"""Parts go to the rank with the least so far."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import assign_least_loaded


@given(st.data())
def test_each_part_goes_to_the_least_loaded_candidate(data):
    num_ranks = data.draw(st.integers(1, 6))
    one = st.tuples(st.integers(0, 9), st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=6))
    parts = data.draw(st.lists(one, max_size=20))
    ranks = [rank for _, candidates in parts for rank in candidates]
    end = np.cumsum([len(candidates) for _, candidates in parts], dtype=np.int64)
    first = end - [len(candidates) for _, candidates in parts]
    found = assign_least_loaded(np.array([cost for cost, _ in parts]), first, end, np.array(ranks), num_ranks)
    loads = [0] * num_ranks
    for place, low, (cost, candidates) in zip(found.tolist(), first.tolist(), parts, strict=True):
        wanted = min(candidates, key=lambda rank: loads[rank])
        assert place - low == candidates.index(wanted)
        loads[wanted] += cost


@pytest.mark.parametrize(
    "change",
    [
        {"costs": [-1, 1]},
        {"costs": [1]},
        {"costs": [2**62, 2**62]},
        {"first": [1, 1]},
        {"first": [-1, 1]},
        {"end": [1, 3]},
        {"ranks": [0, 2]},
        {"ranks": [0, -1]},
        {"ranks": [[0], [1]]},
    ],
)
def test_what_is_no_assignment_is_refused(change):
    given_ = {"costs": [1, 2], "first": [0, 1], "end": [1, 2], "ranks": [0, 1], **change}
    with pytest.raises(ArgumentError, match="parts must each have a cost"):
        assign_least_loaded(**{name: np.array(value) for name, value in given_.items()}, num_ranks=2)
