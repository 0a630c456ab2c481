"""Tests of `add_index`, which appends a whole pair to a builder."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.files.built_pair import build, names_in
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, verify_content


def test_another_pair_is_added_whole(prefix, pair):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_item([1])
    builder.add_index(str(pair.prefix))  # continues the current document, as in Megatron Core
    builder.add_document([2], [1])
    builder.finalize(f"{prefix}.idx")
    dataset = IndexedDataset(str(prefix))
    assert [tokens.tolist() for tokens in dataset[:]] == [[1], *pair.sequences(), [2]]
    assert dataset.document_indices.tolist() == [0, 3, 4, 5]
    verify_content(str(prefix))


def test_a_pair_with_modes_is_added_with_them(prefix, pair):
    modal = replace(pair, modes=[1, 0, -1]).write()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", multimodal=True)
    builder.add_document([1], [1], [5])
    builder.add_index(str(modal.prefix))
    builder.finalize(f"{prefix}.idx")
    assert IndexedDataset(str(prefix), multimodal=True).sequence_modes.tolist() == [5, 1, 0, -1]


def test_a_pair_of_another_type_is_not_added(prefix, pair):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    with pytest.raises(ArgumentError, match=r"corpus.* dtype must be uint16 .*found int32"):
        builder.add_index(str(pair.prefix))
    builder.discard()


def test_a_pair_without_modes_is_not_added_to_a_multimodal_one(prefix, pair):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", multimodal=True)
    with pytest.raises(ArgumentError, match=r"corpus\.idx: only a pair with modes .*out\.bin, found one without"):
        builder.add_index(str(pair.prefix))
    builder.discard()


def test_a_pair_with_modes_is_not_added_to_one_without(prefix, pair):
    pair.modes = [1, 2, 3]
    pair.write()
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    with pytest.raises(ArgumentError, match=r"corpus\.idx: only a pair without modes .*out\.bin, found one with"):
        builder.add_index(str(pair.prefix))
    builder.discard()


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [5, 6, 7, -1]},
        {"tokens": [5, 6, 7, -1, 9, 10]},
        {"lengths": [6, -3, 2]},  # the right sum
        {"lengths": [2, 1, 2], "pointers": [0, 12, 12]},
        {"pointers": [0, 12, 8]},
        {"borders": [0, 4, 3]},
        {"borders": [1, 2, 3]},
        {"borders": [0, 2, 2]},
        {"version": 2},
        {"trailing": b"\x00"},
    ],
)
def test_a_damaged_pair_is_not_added(prefix, pair, changes):
    replace(pair, **changes).write()
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document([1], [1])
    with pytest.raises(FormatError, match=r"corpus\.(bin|idx)"):
        builder.add_index(str(pair.prefix))
    builder.add_document([2], [1])
    builder.finalize(f"{prefix}.idx")
    assert [tokens.tolist() for tokens in IndexedDataset(str(prefix))[:]] == [[1], [2]]


def test_a_pair_that_is_not_there_is_not_added(prefix, tmp_path):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    with pytest.raises(FileNotFoundError):
        builder.add_index(str(tmp_path / "none"))
    builder.discard()
    assert names_in(tmp_path) == []


def test_a_pair_can_be_added_to_its_own_successor(prefix):
    build(prefix, [[1], [2]])
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_index(str(prefix))
    builder.add_document([3], [1])
    builder.finalize(f"{prefix}.idx")
    assert [tokens.tolist() for tokens in IndexedDataset(str(prefix))[:]] == [[1], [2], [3]]
