"""The order in which bucket groups are reduced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.buffers import new_buffer, parameters
from trackbed.errors import GradientError
from trackbed.grads import partition_buckets
from trackbed.grads.issue_order import IssueOrder

NUM = 4


def new_order(num_ranks=1):
    buffer = new_buffer(parameters(*[(2,)] * NUM), bucket_size=1, overlap_grad_reduce=True)
    groups = partition_buckets([buffer])
    return groups, IssueOrder(groups, rank=0, num_ranks=num_ranks, check=None)


def issued(groups):
    return [group.is_issued for group in groups]


@given(st.permutations(range(NUM)))
def test_a_group_is_issued_when_all_before_it_are_ready(arrivals):
    groups, order = new_order()
    ready = set()
    for number in arrivals:
        order.ready(number, force_all_reduce=False)
        ready.add(number)
        count = next((place for place in range(NUM) if place not in ready), NUM)
        assert issued(groups) == [place < count for place in range(NUM)]
        assert order.unissued() == groups[count:]


def test_the_rest_is_issued_ready_or_not():
    groups, order = new_order()
    order.ready(2, force_all_reduce=False)
    order.issue_rest(force_all_reduce=False)
    assert issued(groups) == [True] * NUM
    order.issue_rest(force_all_reduce=False)
    assert order.unissued() == []


def test_a_step_that_was_given_up_halfway_cannot_be_followed_by_another():
    _, order = new_order(num_ranks=2)
    order.ready(0, force_all_reduce=False)
    order.reset(has_begun=False)
    with pytest.raises(GradientError, match="step 0 was given up after 1 of 4 bucket groups were issued"):
        order.issue_rest(force_all_reduce=False)


@pytest.mark.parametrize("num_issued", [0, NUM])
def test_a_step_may_be_dropped_before_its_first_and_after_its_last_bucket(num_issued):
    groups, order = new_order(num_ranks=2)
    for number in range(num_issued):
        order.ready(number, force_all_reduce=False)
    order.reset(has_begun=True)
    assert issued(groups) == [False] * NUM
    order.issue_rest(force_all_reduce=False)
    assert issued(groups) == [True] * NUM


def test_one_rank_may_give_up_any_step():
    groups, order = new_order()
    order.ready(0, force_all_reduce=False)
    order.reset(has_begun=False)
    order.issue_rest(force_all_reduce=False)
    assert issued(groups) == [True] * NUM


def test_steps_are_counted_only_if_something_happened_in_them():
    groups, order = new_order()
    order.reset(has_begun=False)
    assert [group.label for group in groups] == [(0, number) for number in range(NUM)]
    order.reset(has_begun=True)
    order.issue_rest(force_all_reduce=False)
    order.reset(has_begun=False)
    order.reset(has_begun=False)
    assert [group.label for group in groups] == [(2, number) for number in range(NUM)]
