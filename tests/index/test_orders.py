import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.index import (
    EpochPlan,
    LegacyShuffle,
    document_index,
    exhaustive_blend,
    greedy_blend,
    sample_index,
    shuffle_index,
)
from trackbed.index.documents import document_index_dtype
from trackbed.index.samples import sample_index_dtype
from trackbed.index.shuffle import shuffle_index_dtype
from trackbed.kernels import reference


@given(st.integers(1, 50), st.integers(1, 5), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_document_is_visited_once_an_epoch(num_documents, num_epochs, separate, seed):
    before_last = 0 if separate and num_epochs > 1 else None
    plan = EpochPlan(num_epochs=num_epochs, num_samples=10, samples_before_last=before_last)
    visits = document_index(np.arange(7, 7 + num_documents), plan, LegacyShuffle(seed))
    assert visits.dtype == np.int32
    assert (np.bincount(visits, minlength=7 + num_documents)[7:] == num_epochs).all()
    if before_last is not None:
        assert sorted(visits[-num_documents:]) == list(range(7, 7 + num_documents))


@given(st.integers(0, 200), st.integers(0, 2**32 - 1), st.data())
def test_samples_of_a_separate_last_epoch_stay_at_the_end(num_samples, seed, data):
    border = data.draw(st.none() | st.integers(0, num_samples))
    plan = EpochPlan(num_epochs=2, num_samples=num_samples, samples_before_last=border)
    order = shuffle_index(plan, LegacyShuffle(seed))
    assert sorted(order) == list(range(num_samples))
    if border:
        assert order[:border].max() < border


def test_a_shuffle_goes_on_where_the_one_before_stopped():
    state = np.random.RandomState(1234)
    wanted = [np.arange(10), np.arange(7)]
    found = [array.copy() for array in wanted]
    shuffle = LegacyShuffle(1234)
    for mine, numpys in zip(found, wanted, strict=True):
        shuffle(mine)
        state.shuffle(numpys)
        assert (mine == numpys).all()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_cannot_take_is_refused(seed):
    with pytest.raises(ArgumentError, match=r"random_seed must be a whole number in \[0, 2\*\*32\)"):
        LegacyShuffle(seed)


def test_types_are_megatron_cores_and_wider_where_those_overflow():
    assert document_index_dtype(np.array([2**31 - 1])) is np.int32
    assert document_index_dtype(np.array([2**31])) is np.int64
    assert sample_index_dtype(2**31 - 1, 5) is np.int32
    assert sample_index_dtype(2**31, 5) is np.int64
    assert sample_index_dtype(5, 2**31) is np.int64
    assert shuffle_index_dtype(2**32 - 3) is np.uint32
    assert shuffle_index_dtype(2**32 - 2) is np.int64


@pytest.mark.parametrize(("num_datasets", "dtype"), [(32_766, np.int16), (32_767, np.int32), (70_000, np.int32)])
def test_blends_of_more_datasets_than_megatron_core_takes_are_wider(num_datasets, dtype):
    weights = np.random.default_rng(0).random(num_datasets)
    datasets, samples = greedy_blend(weights / weights.sum(), 300)
    assert datasets.dtype == dtype
    wanted = reference.greedy_blend(weights / weights.sum(), 300)
    assert (datasets == wanted[0]).all()
    assert (samples == wanted[1]).all()


def test_an_exhaustive_blend_of_one_dataset_is_its_samples():
    datasets, samples = exhaustive_blend([4])
    assert (datasets.tolist(), samples.tolist()) == ([0] * 4, [0, 1, 2, 3])


def test_an_empty_file_has_a_sample_index_of_one_row():
    empty = np.empty(0, dtype=np.int32)
    assert sample_index(empty, empty, 0, sequence_length=8, extra_token=1).tolist() == [[0, 0]]
