import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError
from trackbed.kernels import SmallDataset, reference, small_indices


@st.composite
def small_datasets(draw):
    """A dataset, and the lengths in its file."""
    documents = draw(st.integers(0, 30))
    first = draw(st.integers(0, 5))
    num_epochs = draw(st.integers(1, 4))
    num_samples = draw(st.integers(0, 40))
    apart = draw(st.integers(-1, num_samples)) if num_epochs > 1 else -1
    shape = {"sequence_length": draw(st.integers(1, 40)), "extra_token": draw(st.integers(0, 1))}
    seed = draw(st.integers(0, 2**32 - 1))
    lengths = draw(st.lists(st.integers(0, 50), min_size=documents, max_size=documents))
    dataset = SmallDataset(first, documents, num_epochs, num_samples, apart, **shape, seed=seed)
    return dataset, np.array(lengths, dtype=np.int32)


@given(st.lists(small_datasets(), max_size=5))
def test_small_indices_equal_their_reference(drawn):
    found = small_indices([dataset for dataset, _ in drawn], [lengths for _, lengths in drawn])
    assert len(found) == len(drawn)
    for one, (dataset, lengths) in zip(found, drawn, strict=True):
        for array, wanted in zip(one, reference.small_indices(dataset, lengths), strict=True):
            np.testing.assert_array_equal(array, wanted)
        assert [array.dtype for array in one] == [np.int32, np.int32, np.uint32]


def test_lengths_may_lie_at_an_odd_address():
    raw = np.zeros(2 + 4 * 4, dtype=np.uint8)
    lengths = raw[2:].view("<i4")
    lengths[:] = [8, 9, 10, 11]
    dataset = SmallDataset(1, 4, 1, 4, -1, sequence_length=8, extra_token=1, seed=1)
    aligned = small_indices([dataset], [lengths.copy()])[0]
    for found, wanted in zip(small_indices([dataset], [lengths])[0], aligned, strict=True):
        np.testing.assert_array_equal(found, wanted)


PLAIN = {"first": 0, "num_documents": 2, "num_epochs": 1, "num_samples": 1, "samples_before_last": -1}
SHAPE = {"sequence_length": 4, "extra_token": 1, "seed": 7}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"first": -1}, r"first must be in \[0, 2147483647\], found -1"),
        ({"num_documents": 2**31}, r"num_documents must be in"),
        ({"num_epochs": 0}, r"num_epochs must be in \[1, "),
        ({"num_samples": -1}, r"num_samples must be in"),
        ({"sequence_length": 0}, r"sequence_length must be in \[1, "),
        ({"extra_token": 2}, r"extra_token must be in \[0, 1\], found 2"),
        ({"seed": 2**32}, r"seed must be in"),
        ({"num_documents": 2**30, "num_epochs": 4}, "visits must fit 31 bits"),
        ({"samples_before_last": 0}, "samples before the last epoch"),
        ({"samples_before_last": 2, "num_epochs": 2}, "samples before the last epoch"),
        ({"num_documents": 4}, "each of 4 documents of dataset 0 must have a length of at least 0, found 3 of them"),
    ],
)
def test_parameters_out_of_range_are_refused(changed, words):
    dataset = SmallDataset(**{**PLAIN, **SHAPE, **changed})
    with pytest.raises(ArgumentError, match=words):
        small_indices([dataset], [np.array([3, 4, 5], dtype=np.int32)])


def test_a_negative_length_is_refused_and_the_dataset_named():
    dataset = SmallDataset(**PLAIN, **SHAPE)
    lengths = [np.array([3, 4], dtype=np.int32), np.array([3, -4], dtype=np.int32)]
    with pytest.raises(
        ArgumentError, match=r"of 2 documents of dataset 1 must have .* found 2 of them, the shortest -4"
    ):
        small_indices([dataset, dataset], lengths)


@pytest.mark.parametrize(
    "lengths", [[np.zeros(3, np.int64)], [np.zeros((2, 2), np.int32)], [np.zeros(6, np.int32)[::2]]]
)
def test_lengths_of_another_shape_or_type_are_refused(lengths):
    with pytest.raises(ArgumentError, match="lengths must be a contiguous vector of int32"):
        small_indices([SmallDataset(**PLAIN, **SHAPE)], lengths)


def test_there_must_be_lengths_for_each():
    with pytest.raises(ArgumentError, match="lengths for each of 1 datasets, found 0"):
        small_indices([SmallDataset(**PLAIN, **SHAPE)], [])


def test_many_datasets_can_be_ended():
    class EndedError(Exception):
        pass

    def end(_done):
        raise EndedError

    dataset = SmallDataset(**{**PLAIN, "num_documents": 1000}, **SHAPE)
    with pytest.raises(EndedError):
        small_indices([dataset] * 20_000, [np.ones(1000, dtype=np.int32)] * 20_000, poll=end)
