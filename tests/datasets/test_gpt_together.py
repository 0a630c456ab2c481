"""Indices of many small datasets, made in one call: the same as those of each made alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blends import build, gpt_config, write_pair
from indexed_pair import Pair
from trackbed.cache import in_memory
from trackbed.datasets import gpt_together
from trackbed.datasets.gpt_indices import ARRAYS, GPTIndices
from trackbed.datasets.gpt_together import build_together
from trackbed.errors import FormatError, TrackbedError
from trackbed.index.runs import run


class Lengths:
    """A low-level dataset of which only the lengths are asked for."""

    def __init__(self, lengths):
        self.sequence_lengths = np.array(lengths, dtype=np.int32)


@st.composite
def gpt_indices(draw):
    lengths = draw(st.lists(st.integers(0, 30), min_size=1, max_size=30))
    start, stop = sorted(draw(st.lists(st.integers(0, len(lengths)), min_size=2, max_size=2)))
    return GPTIndices(
        dataset=Lengths(lengths),
        documents=draw(st.sampled_from([run(start, stop), np.arange(start, stop), None])),
        num_samples=draw(st.none() | st.integers(0, 60)),
        sequence_length=draw(st.sampled_from([1, 2, 7, 16, 64])),
        seed=draw(st.sampled_from([0, 1234, 2**32 - 1])),
        extra_token=draw(st.integers(0, 1)),
        keep_partial=draw(st.booleans()),
    )


def alone(indices):
    """What one dataset gives by itself; None where that is an error."""
    try:
        return indices.build(in_memory)
    except TrackbedError:
        return None


@given(st.lists(gpt_indices(), max_size=6))
def test_indices_made_together_are_those_made_alone(drawn):
    for found, wanted in zip(build_together(drawn), map(alone, drawn), strict=True):
        assert (found is None) == (wanted is None)
        for name in ARRAYS if wanted else ():
            np.testing.assert_array_equal(found[name], wanted[name])
            assert found[name].dtype == wanted[name].dtype


@given(gpt_indices(), st.integers(0, 40))
def test_what_is_not_small_is_left_out(indices, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_together, "_MOST", most)
        found, wanted = build_together([indices])[0], alone(indices)
    # An epoch is never more than all visits, so that those are what counts.
    size = 0 if wanted is None else len(wanted["document_index"]) + len(wanted["shuffle_index"])
    assert (found is None) == (wanted is None or size > most)


def test_documents_that_do_not_follow_one_another_are_left_out():
    indices = GPTIndices(Lengths([4, 5, 6]), np.array([0, 2]), 3, 2, 1, 1, keep_partial=False)
    assert build_together([indices]) == [None]


def test_pairs_are_not_mapped_for_it(tmp_path):
    prefixes = [write_pair(tmp_path / f"pair{number}", [9, 0, 30, 12]) for number in range(8)]
    train = build(gpt_config(tmp_path / "cache", blend=(prefixes, [1.0] * 8), split="1,0,0"), (40, None, None))[0]
    assert not any("_mapped" in vars(member.dataset.index) for member in train.datasets)


def test_a_negative_length_names_its_dataset_among_many(tmp_path):
    prefixes = [write_pair(tmp_path / f"pair{number}", [9, 8, 30, 12]) for number in range(8)]
    Pair(tmp_path / "pair6", [9, -8, 30, 12], [0, 1, 2, 3, 4], list(range(43)), "uint16", [0, 18, 2, 62]).write()
    config = gpt_config(tmp_path / "cache", blend=(prefixes, [1.0] * 8), split="1,0,0")
    with pytest.raises(FormatError, match="pair6, split train: documents must have at least 0"):
        build(config, (40, None, None))
