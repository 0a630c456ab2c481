"""Blends against megatron-core's own helpers, over generated weights and sizes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets import helpers

from tests.support import tiers
from trackbed.index import exhaustive_blend, greedy_blend
from trackbed.kernels import reference

KINDS = {
    "uniform": lambda rng, k: rng.random(k),
    "equal": lambda rng, k: np.ones(k),
    "pareto": lambda rng, k: (1 - rng.random(k)) ** (-1 / 1.1),
    "u^4": lambda rng, k: rng.random(k) ** 4 + 1e-5,
    "few values": lambda rng, k: rng.integers(1, 4, k).astype(float),
    "with zeros": lambda rng, k: np.where(rng.random(k) < 0.5, 0, rng.random(k)),
    "one ulp apart": lambda rng, k: np.nextafter(np.ones(k), np.where(rng.random(k) < 0.5, 0, 2)),
    "nearly equal": lambda rng, k: 1 + rng.random(k) * 1e-12,
    "denormal": lambda rng, k: rng.integers(0, 5, k) * 5e-324,
    "dyadic": lambda rng, k: 2.0 ** -rng.integers(1, 30, k),
    "all scales": lambda rng, k: rng.random(k) * 10.0 ** rng.integers(-300, 0, k),
    "one of nine tenths": lambda rng, k: np.append(rng.random(k - 1), 9 * max(k - 1, 1) / 2),
}
SUMS = {"1": 1.0, "1 + 1e-9": 1 + 1e-9, "0.99": 0.99, "2": 2.0, "as drawn": None}
COUNTS = [1, 2, 3, 7, 16, 47, 48, 49, 50, 64, 100, 257, 1000, 3000]


def by_helper(weights, num_samples):
    datasets, samples = np.zeros(num_samples, np.int16), np.zeros(num_samples, np.int64)
    helpers.build_blending_indices(datasets, samples, weights.tolist(), len(weights), num_samples, False)
    return datasets, samples


def check(weights, num_samples):
    ours, theirs = greedy_blend(weights, num_samples), by_helper(weights, num_samples)
    assert np.array_equal(ours[0].astype(np.int16), theirs[0])
    assert np.array_equal(ours[1], theirs[1])


@given(
    kind=st.sampled_from(sorted(KINDS)),
    count=st.sampled_from(COUNTS),
    total=st.sampled_from(sorted(SUMS)),
    steps=st.integers(0, 2_000_000),
    seed=st.integers(0, 2**32 - 1),
)
@tiers.with_files
def test_greedy_blends_equal_the_helpers(level, kind, count, total, steps, seed):
    weights = KINDS[kind](np.random.default_rng(seed), count)
    if SUMS[total] is not None and 0 < weights.sum() < np.inf:
        weights = weights / weights.sum() * SUMS[total]
    check(weights, min(steps // count, 40_000))


# Two datasets of almost the same error at every step: only the last place of a product tells them apart.
@given(
    count=st.integers(49, 200),
    planted=st.lists(st.tuples(st.integers(0, 199), st.integers(0, 199), st.integers(-2, 2)), min_size=1, max_size=40),
    seed=st.integers(0, 2**32 - 1),
)
def test_near_ties_are_never_pruned_away(count, planted, seed):
    weights = np.random.default_rng(seed).random(count) + 0.01
    weights /= weights.sum()
    for one, other, ulps in planted:
        near = weights[one % count]
        for _ in range(abs(ulps)):
            near = np.nextafter(near, np.inf if ulps > 0 else 0)
        weights[other % count] = near
    check(weights, 5_000)


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=120),
    equal=st.booleans(),
)
def test_exhaustive_blends_equal_the_helpers(level, sizes, equal):
    given_sizes = np.array([sizes[0]] * len(sizes) if equal else sizes)
    datasets, samples = np.zeros(given_sizes.sum(), np.int16), np.zeros(given_sizes.sum(), np.int64)
    helpers.build_exhaustive_blending_indices(datasets, samples, given_sizes, len(given_sizes))
    ours = exhaustive_blend(given_sizes)
    assert np.array_equal(ours[0], datasets)
    assert np.array_equal(ours[1], samples)


def test_the_most_datasets_that_the_helper_takes():
    check(np.random.default_rng(1).random(32_766), 2_000)


def test_seventy_thousand_datasets():
    weights = np.random.default_rng(2).random(70_000)
    datasets, samples = greedy_blend(weights / weights.sum(), 3_000)
    wanted = reference.greedy_blend(weights / weights.sum(), 3_000)
    assert np.array_equal(datasets, wanted[0])
    assert np.array_equal(samples, wanted[1])
    theirs = by_helper(weights / weights.sum(), 3_000)
    assert np.array_equal(datasets.astype(np.int16), theirs[0])  # the low 16 bits are all that it keeps
    assert np.array_equal(samples, theirs[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uniform", "pareto", "u^4", "one of nine tenths"])
@pytest.mark.parametrize("count", [10, 100, 1_000])
def test_a_million_samples(kind, count):
    weights = KINDS[kind](np.random.default_rng(3), count)
    check(weights / weights.sum(), 1_000_000)


@pytest.mark.slow
def test_two_hundred_million_samples_of_a_thousand_datasets():
    weights = np.random.default_rng(1).random(1_000)
    check(weights / weights.sum(), 200_000_000)
