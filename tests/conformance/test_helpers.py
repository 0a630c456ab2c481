"""The kernels against Megatron Core's, wherever those accept the input."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.datasets import helpers

from trackbed.kernels import exhaustive_blend, greedy_blend, sample_index


def greedy_by_megatron(weights, num_samples):
    datasets, samples = np.zeros(num_samples, dtype=np.int16), np.zeros(num_samples, dtype=np.int64)
    helpers.build_blending_indices(datasets, samples, weights, len(weights), num_samples, False)
    return datasets, samples


def exhaustive_by_megatron(sizes):
    total = int(sizes.sum())
    datasets, samples = np.zeros(total, dtype=np.int16), np.zeros(total, dtype=np.int64)
    helpers.build_exhaustive_blending_indices(datasets, samples, sizes, len(sizes))
    return datasets, samples


def equal(found, wanted):
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


@st.composite
def weight_vectors(draw):
    """Shares as users write them, normalised or not, with ties and neighbours an ulp apart."""
    plain = st.floats(1e-6, 1)
    share = draw(plain)
    close = st.sampled_from([np.nextafter(share, 0), share, np.nextafter(share, 2)])
    round_numbers = st.integers(1, 10).map(lambda tenths: tenths / 10)
    weights = np.array(draw(st.lists(draw(st.sampled_from([plain, close, round_numbers])), min_size=1, max_size=60)))
    return weights / weights.sum() if draw(st.booleans()) else weights


@given(weights=weight_vectors(), num_samples=st.integers(0, 400))
def test_greedy_blend_equals_megatron(level, weights, num_samples):
    found = np.empty(num_samples, dtype=np.int16), np.empty(num_samples, dtype=np.int64)
    greedy_blend(weights, *found)
    assert equal(found, greedy_by_megatron(weights, num_samples))


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60).map(np.array))
def test_exhaustive_blend_equals_megatron(level, sizes):
    found = np.empty(int(sizes.sum()), dtype=np.int16), np.empty(int(sizes.sum()), dtype=np.int64)
    exhaustive_blend(sizes, *found)
    assert equal(found, exhaustive_by_megatron(sizes))


@pytest.mark.parametrize("num_datasets", [7, 100, 613])
def test_a_long_blend_of_uneven_shares_equals_megatron(level, num_datasets):
    weights = np.random.default_rng(num_datasets).pareto(1.2, num_datasets) + 1e-3
    weights /= weights.sum()
    found = np.empty(50_000, dtype=np.int16), np.empty(50_000, dtype=np.int64)
    greedy_blend(weights, *found)
    assert equal(found, greedy_by_megatron(weights, 50_000))


@st.composite
def corpora(draw):
    """Lengths of documents, some empty, and epochs of visits to all of them in some order."""
    lengths = draw(st.lists(st.one_of(st.just(0), st.integers(0, 12)), min_size=1, max_size=10))
    assume(sum(lengths) > 1)
    num_epochs = draw(st.integers(1, 4))
    visits = draw(st.permutations([d for d in range(len(lengths)) for _ in range(num_epochs)]))
    return np.array(lengths, dtype=np.int32), np.array(visits, dtype=np.int32), num_epochs


@given(corpus=corpora(), sequence_length=st.integers(2, 15), drop_partial=st.booleans(), extra=st.booleans())
def test_sample_index_equals_megatron(level, corpus, sequence_length, drop_partial, extra):
    lengths, visits, num_epochs = corpus
    arguments = (lengths, visits, sequence_length, num_epochs, int(lengths.sum()), drop_partial)
    try:
        wanted = helpers.build_sample_idx(*arguments, extra)
    except AssertionError:
        # Megatron Core points to token -1 of an empty last document, and then refuses what it made.
        assert extra
        assert not drop_partial
        assert lengths[visits[-1]] == 0
        return
    settings = {"sequence_length": sequence_length, "extra_token": int(extra)}
    narrow_rows = np.full_like(wanted, -7)
    sample_index(lengths, visits, narrow_rows, **settings)
    assert equal([narrow_rows], [wanted])

    wanted = helpers.build_sample_idx_int64(*arguments, int(extra))
    wide_rows = np.full_like(wanted, -7)
    sample_index(lengths, visits, wide_rows, **settings)
    assert equal([wide_rows], [wanted])


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop_partial", [True, False])
def test_the_sample_index_of_a_larger_corpus_equals_megatron(extra, drop_partial):
    random = np.random.default_rng(1)
    lengths = np.minimum(random.lognormal(5.9, 1.0, 100_000), 20_000).astype(np.int32)
    lengths[random.random(len(lengths)) < 0.1] = 0
    visits = np.concatenate([random.permutation(len(lengths)) for _ in range(3)]).astype(np.int32)
    visits = visits[lengths[visits].argsort(kind="stable")[0] :]  # not at the start of an epoch
    num_tokens = int(lengths[visits].sum())
    wanted = helpers.build_sample_idx(lengths, visits, 2048, 1, num_tokens, drop_partial, extra)
    rows = np.full_like(wanted, -7)
    sample_index(lengths, visits, rows, sequence_length=2048, extra_token=int(extra))
    assert equal([rows], [wanted])
