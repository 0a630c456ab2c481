"""Tests of groups of pairs, compared with the pair that `merge` writes."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.built_pair import build
from tests.support.processes.forked import run_in_fork
from tests.support.tiers import with_files
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDataset, IndexedGroup, merge

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=5), min_size=1, max_size=4)


def write_parts(folder, shapes, dtype=np.int32):
    """Pairs of documents of these lengths, whose tokens are all different."""
    parts = []
    token = 0
    for number, lengths in enumerate(shapes):
        documents = []
        for length in lengths:
            documents.append(list(range(token, token + length)))
            token += length
        parts.append(str(folder / f"part{number}"))
        build(parts[-1], documents, dtype)
    return parts


def grouped_and_merged(folder, shapes, **options):
    parts = write_parts(folder, shapes)
    merge(parts, str(folder / "merged"))
    return IndexedGroup.open(str(folder / "group"), parts, **options), IndexedDataset(str(folder / "merged"))


@with_files
@given(SHAPES, st.booleans(), st.data())
def test_a_group_reads_as_the_merged_pair_does(tmp_path, shapes, mmap, data):
    group, merged = grouped_and_merged(tmp_path, shapes, mmap=mmap)
    assert len(group) == len(merged)
    assert group.sequence_lengths.dtype == np.int32
    assert group.sequence_lengths.tolist() == merged.sequence_lengths.tolist()
    assert group.document_indices.tolist() == merged.document_indices.tolist()
    assert group.index.dtype_size == merged.index.dtype_size
    assert list(group.index.sequence_pointers) == merged.index.sequence_pointers.tolist()
    assert group.index.sequence_lengths[1:3] == merged.index.sequence_lengths[1:3].tolist()
    assert (group.index.sequence_count, group.index.document_count) == (len(merged), merged.index.document_count)
    assert [tokens.tolist() for tokens in group[:]] == [tokens.tolist() for tokens in merged[:]]
    if len(group):
        sequence = data.draw(st.integers(-len(group), len(group) - 1))
        offset = data.draw(st.integers(0, 6))
        length = data.draw(st.none() | st.integers(0, 20))
        assert read(group, sequence, offset, length) == read(merged, sequence, offset, length)


def read(dataset, *arguments):
    """Result of a read, or the fact that it is refused."""
    try:
        tokens = dataset.get(*arguments)
    except FormatError:
        return "refused"
    assert tokens.dtype == np.int32
    return tokens.tolist()


def test_a_range_reaches_over_pairs_that_are_empty(tmp_path):
    group, _ = grouped_and_merged(tmp_path, [[2, 2], [], [0], [3]])
    assert group.get(1, offset=1, length=3).tolist() == [3, 4, 5]
    assert group.get(0, offset=4, length=3).tolist() == [4, 5, 6]


def test_files_are_mapped_when_they_are_read(tmp_path):
    group, _ = grouped_and_merged(tmp_path, [[2], [2], [2]])
    (tmp_path / "part2.bin").unlink()
    assert group.get(1).tolist() == [2, 3]
    with pytest.raises(FormatError, match=r"part2\.bin: the file must be the one that was opened, found nothing"):
        group.get(2)


@pytest.mark.parametrize("sequence", [3, -4])
def test_a_sequence_that_is_not_there_is_refused(tmp_path, sequence):
    group, _ = grouped_and_merged(tmp_path, [[2], [2, 1]])
    with pytest.raises(IndexError, match=rf"group: a sequence must be in \[-3, 3\), found {sequence}"):
        group.get(sequence)
    with pytest.raises(ValueError, match="step of 2"):
        group[::2]


def test_a_group_needs_pairs_and_all_of_one_type(tmp_path):
    with pytest.raises(ArgumentError, match="at least one pair, found none"):
        IndexedGroup.open("g", [])
    first = write_parts(tmp_path, [[1]])
    (tmp_path / "other").mkdir()
    second = write_parts(tmp_path / "other", [[1]], np.uint16)
    with pytest.raises(ArgumentError, match=r"tokens of one type, found int32 in .*part0 and uint16 in .*other/part0"):
        IndexedGroup.open("g", [*first, *second])


def test_its_identity_changes_with_its_pairs_and_their_order(tmp_path):
    parts = write_parts(tmp_path, [[1], [2]])
    one, other, turned = (IndexedGroup.open("g", chosen) for chosen in (parts, parts[:1], parts[::-1]))
    assert one.identity == IndexedGroup.open("another name", parts).identity
    assert len({str(group.identity) for group in (one, other, turned)}) == 3
    assert one.identity["bin_bytes"] == 12


def test_a_copy_reads_on_in_another_process(tmp_path):
    group, _ = grouped_and_merged(tmp_path, [[2], [3]])
    group.get(0)
    assert len(pickle.dumps(group)) < 2000
    copy = pickle.loads(pickle.dumps(group))
    assert copy.get(1).tolist() == [2, 3, 4]
    assert copy.index.sequence_pointers[1] == 8
    assert run_in_fork(lambda: group.get(1).tolist()) == [2, 3, 4]
