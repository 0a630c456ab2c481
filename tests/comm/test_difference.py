"""The first difference between ranks: which two ranks, which field, and what each has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.comm import run_ranks
from trackbed.comm.difference import (
    RankDifference,
    difference_of,
    digest_of,
    find_difference,
    first_difference,
    first_unlike_item,
    unlike_ranks,
    unpacked,
)

VALUES = st.recursive(
    st.none() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), below, max_size=2),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        (["a"], None),
        (["a", "a"], None),
        (["a", "b"], (0, 1)),
        (["b", "a", "a"], (1, 0)),
        (["a", "c", "b", "b", "a"], (0, 1)),
    ],
)
def test_the_usual_value_is_the_most_frequent_one_and_then_that_of_the_lowest_rank(values, ranks):
    assert unlike_ranks(values) == ranks


@given(VALUES, VALUES)
def test_a_difference_is_found_if_and_only_if_values_differ(first, second):
    difference = difference_of({3: first, 5: second})
    assert (difference is None) == (digest_of(first) == digest_of(second))
    if difference is not None:
        assert (difference.usual_rank, difference.rank) == (3, 5)


@pytest.mark.parametrize(
    ("first", "second", "absent", "found"),
    [
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, None, ("a.b[1]", 2, 3)),
        ({"a": 1}, {}, None, ("a", 1, None)),
        ([1, 2], [1], None, ("", [1, 2], [1])),
        ([1, 2], [1], "no more", ("[1]", 2, "no more")),
        (1, [1], None, ("", 1, [1])),
    ],
)
def test_the_first_field_is_as_deep_as_both_values_have_the_same_structure(first, second, absent, found):
    field, usual_value, value = found
    expected = RankDifference(1, 0, field, value, usual_value)
    assert first_difference((0, first), (1, second), absent=absent) == expected


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_items_before_the_first_that_differs_are_equal(first, second):
    number = first_unlike_item(first, second)
    assert first[:number] == second[:number]
    assert first[number : number + 1] != second[number : number + 1] or first == second


def test_all_ranks_find_the_same_difference_and_two_alone_send_their_values():
    sent = []

    def work(group):
        lines = ["one", "two" if group.rank != 2 else "three"]
        gather = group.all_gather

        def noted(value):
            sent.append(value and unpacked(value))
            return gather(value)

        group.all_gather = noted
        return str(find_difference(group, gather(digest_of(lines)), lines))

    assert run_ranks(4, work) == ["rank 2 has three, and rank 0 two"] * 4
    assert sorted(map(repr, sent)) == ["None", "None", "['one', 'three']", "['one', 'two']"]


def test_ranks_that_agree_send_nothing():
    def work(group):
        digests = group.all_gather(digest_of(["one"]))
        group.all_gather = None
        return find_difference(group, digests, ["one"])

    assert run_ranks(3, work) == [None] * 3
