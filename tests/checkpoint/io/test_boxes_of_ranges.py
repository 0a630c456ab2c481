"""Ranges of the elements of a tensor as boxes."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trackbed.checkpoint import boxes


@given(data=st.data(), shape=st.lists(st.integers(0, 6), max_size=5))
def test_boxes_have_the_elements_in_their_order(data, shape):
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = np.arange(count).reshape(shape)
    found = boxes(tuple(shape), start, stop)
    pieces = [
        whole[tuple(slice(low, low + size) for low, size in zip(first, sizes, strict=True))] for first, sizes in found
    ]
    assert np.concatenate([np.empty(0, dtype=int), *(piece.reshape(-1) for piece in pieces)]).tolist() == list(
        range(start, stop)
    )
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(0 not in sizes for _, sizes in found)
    assert found or start == stop


def test_large_tensors():
    assert boxes((1 << 40, 3), 1, (3 << 40) - 1) == [
        ((0, 1), (1, 2)),
        ((1, 0), ((1 << 40) - 2, 3)),
        (((1 << 40) - 1, 0), (1, 2)),
    ]
