from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.index.splits import (
    convert_split_vector_to_split_matrix,
    get_blend_from_list,
    normalize,
    parse_and_normalize_split,
    split_range,
)


def test_a_split_matrix_begins_with_the_integer_zero_that_names_of_indices_show():
    (start, _), *_ = convert_split_vector_to_split_matrix([0.9, 0.1, 0.0])
    assert start == 0
    assert isinstance(start, int)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=3).filter(any), st.integers(0, 10_000))
def test_the_parts_of_a_split_follow_each_other_and_cover_everything(shares, num_elements):
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(",".join(map(str, shares))))
    ranges = [split_range(bounds, num_elements) for bounds in matrix if bounds]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == num_elements
    assert all(before[1] == after[0] for before, after in pairwise(ranges))


@pytest.mark.parametrize("split", ["", "0,0,0", "1,2,3,4", "a,b", "1..2"])
def test_a_split_that_is_none_is_refused_with_what_was_found(split):
    with pytest.raises(ArgumentError, match="split must be") as error:
        parse_and_normalize_split(split)
    assert repr(split) in str(error.value)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0], []])
def test_weights_that_have_no_sum_are_refused(weights):
    with pytest.raises(ArgumentError, match="weights must be"):
        normalize(weights)


def test_weights_are_added_up_as_numpy_does():
    weights = np.random.default_rng(0).random(1000)
    assert normalize(weights) == (weights / weights.sum()).tolist()


def test_a_blend_list_of_odd_length_is_prefixes():
    assert get_blend_from_list(["30", " web ", "books"]) == (["30", "web", "books"], None)


def test_an_empty_blend_list_is_refused():
    with pytest.raises(ValueError, match="blend must have at least one prefix, found an empty list"):
        get_blend_from_list([])


def test_no_blend_list_is_no_blend():
    assert get_blend_from_list(None) is None


def test_a_blend_list_with_some_words_for_weights_is_refused():
    with pytest.raises(AssertionError, match="'heavy'"):
        get_blend_from_list(["30", "web", "heavy", "books"])
