from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.index import balanced_blend, largest_remainders

weights = st.lists(st.floats(0, 1e300, allow_nan=False), min_size=1, max_size=20).filter(any)


@given(weights=weights, num_samples=st.integers(0, 10**12))
def test_counts_are_the_largest_remainders(weights, num_samples):
    counts = largest_remainders(weights, num_samples)
    assert sum(counts) == num_samples
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) * num_samples / total for weight in weights]
    more = [count - int(share) for count, share in zip(counts, shares, strict=True)]
    assert set(more) <= {0, 1}
    ranked = sorted(range(len(shares)), key=lambda d: (-(shares[d] - int(shares[d])), d))
    assert all(more[d] == 1 for d in ranked[: sum(more)])


def test_ties_go_to_the_lowest_dataset():
    assert largest_remainders([1, 1, 1], 4) == [2, 1, 1]
    assert largest_remainders([0, 1, 1, 1], 5) == [0, 2, 2, 1]


def test_a_share_is_what_the_double_says():
    # In doubles 0.1 + 0.2 + 0.7 makes 1 less an ulp, and 0.1 * 10 makes 1.
    assert largest_remainders([0.1, 0.2, 0.7], 10) == [1, 2, 7]
    assert largest_remainders([5e-324, 1e308], 10) == [0, 10]


@pytest.mark.parametrize("bad", [[], [0.0, 0.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_are_no_shares_are_refused(bad):
    with pytest.raises(ArgumentError, match="weights must be finite"):
        largest_remainders(bad, 5)


@given(sizes=st.lists(st.integers(0, 50), max_size=20), seed=st.integers(0, 2**64 - 1))
def test_every_sample_of_every_dataset_comes_once(sizes, seed):
    datasets, samples = balanced_blend(sizes, seed=seed)
    found = sorted(zip(datasets.tolist(), samples.tolist(), strict=True))
    assert found == [(d, sample) for d, size in enumerate(sizes) for sample in range(size)]


def test_types_are_as_narrow_as_they_can_be():
    assert [array.dtype for array in balanced_blend([1, 2], seed=1)] == [np.uint16, np.uint32]
    assert balanced_blend([0] * 65_535 + [1], seed=1)[0].dtype == np.uint32
    assert balanced_blend([0] * 65_534 + [1], seed=1)[0].dtype == np.uint16
