import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.index import EpochPlan, LegacyShuffle, legacy_random
from trackbed.index.ranges import number_range
from trackbed.index.visits import visit_indices
from trackbed.kernels import reference

SHAPE = {"sequence_length": 8, "extra_token": 1}


@pytest.fixture(autouse=True)
def no_cached_shuffles():
    legacy_random.clear_shuffle_cache()
    yield
    legacy_random.clear_shuffle_cache()


def wanted(documents, lengths, plan, *, seed, sequence_length, extra_token):
    """Visits by NumPy's generator, and rows by the reference of the kernel."""
    state, visits = np.random.RandomState(seed), np.tile(documents, plan.num_epochs)
    border = 0 if plan.samples_before_last is None else len(visits) - len(documents)
    state.shuffle(visits[:border])
    state.shuffle(visits[border:])
    shape = {"sequence_length": sequence_length, "extra_token": extra_token}
    return visits, reference.sample_index(lengths, visits, plan.num_samples, **shape)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    documents=st.one_of(st.none(), st.lists(st.integers(0, 2**31), min_size=1, max_size=40)),
    num_epochs=st.integers(1, 4),
    is_apart=st.booleans(),
    extra_token=st.integers(0, 1),
    most_pairs=st.sampled_from([0, 1 << 20]),
    dtype=st.sampled_from([np.int32, np.int64]),
    seed=st.integers(0, 2**32 - 1),
)
def test_visits_and_samples_are_those_of_two_steps(
    lengths, documents, num_epochs, is_apart, extra_token, most_pairs, dtype, seed
):
    lengths = np.array(lengths, dtype=dtype)
    first = len(lengths) // 3
    own = number_range(first, len(lengths)) if documents is None else np.array(documents) % len(lengths)
    plan = EpochPlan(num_epochs=num_epochs, num_samples=9, samples_before_last=3 if is_apart else None)
    shape = {"sequence_length": 8, "extra_token": extra_token}
    visits, rows = visit_indices(own, lengths, plan, LegacyShuffle(seed), **shape, most_pairs=most_pairs)
    documents, samples = wanted(own, lengths, plan, seed=seed, **shape)
    assert (visits.dtype, rows.dtype) == (np.int32, np.int32)
    assert visits.tolist() == documents.tolist()
    assert rows.tolist() == samples.tolist()


@pytest.mark.parametrize("most_pairs", [0, 1 << 20])
def test_the_next_shuffle_continues_where_the_visits_stopped(most_pairs):
    plan, lengths = EpochPlan(num_epochs=1, num_samples=3, samples_before_last=None), np.full(50, 9, np.int32)
    shuffle, after = LegacyShuffle(7), np.arange(100)
    visit_indices(number_range(0, 50), lengths, plan, shuffle, **SHAPE, most_pairs=most_pairs)
    shuffle(after)
    state, numpys = np.random.RandomState(7), np.arange(100)
    state.shuffle(np.arange(50))
    state.shuffle(numpys)
    assert after.tolist() == numpys.tolist()


def test_datasets_of_equal_counts_share_a_shuffle_from_the_second_one_on(monkeypatch):
    paired = []
    real = legacy_random.kernels.pair_lengths
    monkeypatch.setattr("trackbed.kernels.pair_lengths", lambda *given: paired.append(real(*given)))
    lengths = np.random.default_rng(0).integers(0, 30, 15_000, dtype=np.int32)
    plan = EpochPlan(num_epochs=1, num_samples=5_000, samples_before_last=None)
    for first in (0, 7, 5_000):
        own = number_range(first, first + 9_000)
        visits, rows = visit_indices(own, lengths, plan, LegacyShuffle(3), **SHAPE)
        documents, samples = wanted(own, lengths, plan, seed=3, **SHAPE)
        assert (visits == documents).all()
        assert (rows == samples).all()
    assert len(paired) == 1


@pytest.mark.parametrize("documents", [[0, 2**31], [-1, 1], [-1, 0], [1, 2]])
def test_documents_that_the_file_lacks_are_refused(documents):
    plan = EpochPlan(num_epochs=1, num_samples=1, samples_before_last=None)
    found = re.escape(f"found [{documents[0]}, {documents[1] + 1})")
    with pytest.raises(ArgumentError, match=rf"documents must be in \[0, 2\), {found}"):
        visit_indices(np.array(documents), np.array([9, 9], np.int32), plan, LegacyShuffle(1), **SHAPE)


@pytest.mark.parametrize("most_pairs", [0, 1 << 20])
@pytest.mark.parametrize("wild", [-1, -(2**31)])
def test_a_negative_length_is_refused_wherever_it_is(most_pairs, wild):
    plan = EpochPlan(num_epochs=1, num_samples=3, samples_before_last=None)
    for at in range(6):
        lengths = np.full(6, 9, np.int32)
        lengths[at] = wild
        with pytest.raises(ArgumentError, match=rf"lengths must be in .* = {wild}"):
            visit_indices(np.arange(6), lengths, plan, LegacyShuffle(1), **SHAPE, most_pairs=most_pairs)
