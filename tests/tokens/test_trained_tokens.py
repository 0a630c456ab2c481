"""Trained tokens of documents: a file beside a pair, which is replaced, merged and verified with it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.built_pair import build, names_in
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDatasetBuilder, merge, verify, verify_content
from trackbed.tokens.trained_tokens import TrainedColumns, TrainedTokens, runs_of


def write(prefix, masks):
    """Writes a pair of one document for each mask, with the numbers of its places as its tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    builder.trained = TrainedColumns()
    for mask in masks:
        builder.add_document(list(range(len(mask))), [len(mask)])
        runs = runs_of(np.array(mask, dtype=bool))
        builder.trained.add(np.array([len(runs)]), runs, lengths=np.array([len(mask)]), where="mask")
    builder.finalize(f"{prefix}.idx")


def found(prefix, masks):
    trained = TrainedTokens.open(str(prefix))
    return [trained.of(number, len(mask)).astype(int).tolist() for number, mask in enumerate(masks)]


MASKS = [[0, 1, 1, 0, 1], [], [0, 0], [1, 1, 1]]


def test_each_document_has_its_trained_tokens(prefix):
    write(prefix, MASKS)
    assert found(prefix, MASKS) == MASKS
    trained = TrainedTokens.open(str(prefix))
    assert (len(trained), len(trained.runs), trained.num_trained) == (4, 3, 6)
    assert verify_content(str(prefix)).documents == 4
    assert (prefix.parent / "out.mask").stat().st_size == 32 + 8 * 5 + 8 * 3
    with pytest.raises(IndexError, match=r"document must be in \[0, 4\), found 4"):
        trained.of(4, 1)


@given(masks=st.lists(st.lists(st.integers(0, 1), max_size=20), max_size=10))
def test_any_mask_comes_back(tmp_path_factory, masks):
    prefix = tmp_path_factory.mktemp("any") / "out"
    write(prefix, masks)
    assert found(prefix, masks) == masks


def test_a_pair_without_a_mask_removes_that_of_an_older_pair(prefix):
    write(prefix, MASKS)
    build(prefix, [[1, 2, 3]])
    assert TrainedTokens.open(str(prefix)) is None
    assert names_in(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]


def test_documents_of_parts_without_a_mask_are_trained_as_a_whole(tmp_path):
    write(tmp_path / "one", MASKS)
    build(tmp_path / "two", [[1, 2, 3], [4]])
    for names, wanted in (
        (("one", "two"), [*MASKS, [1, 1, 1], [1]]),
        (("two", "one"), [[1, 1, 1], [1], *MASKS]),
        (("two", "one", "two"), [[1, 1, 1], [1], *MASKS, [1, 1, 1], [1]]),
    ):
        merge([str(tmp_path / name) for name in names], str(tmp_path / "all"))
        assert found(tmp_path / "all", wanted) == wanted
        verify_content(str(tmp_path / "all"))


@pytest.mark.parametrize(
    ("counts", "runs", "lengths", "problem"),
    [
        ([1], [[0, 4]], [3], r"document 0: a run must lie in \[0, 3\), found 4 tokens from 0 on"),
        ([2], [[2, 2], [3, 1]], [9], r"document 0: a run must lie in \[4, 9\), found 1 tokens from 3 on"),
        ([0, 1], [[2, 0]], [1, 5], r"document 1: a run must lie in \[0, 5\), found 0 tokens from 2 on"),
        ([2], [[2, 2]], [9], r"runs must be \[2, 2\] of 1 documents, found \[1, 2\]"),
    ],
)
def test_runs_that_cannot_be_are_refused(counts, runs, lengths, problem):
    columns = TrainedColumns()
    with pytest.raises(ArgumentError, match=problem):
        columns.add(np.array(counts), np.array(runs), lengths=np.array(lengths), where="mask")
    assert len(columns) == 0


def test_a_builder_needs_the_mask_of_every_document(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.int32)
    builder.trained = TrainedColumns()
    builder.add_document([1, 2], [2])
    with pytest.raises(ArgumentError, match="each of 1 documents must have a mask, found 0"):
        builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda raw: raw[:-8], r"must have \d+ bytes for 4 documents and"),
        (lambda raw: b"X" + raw[1:], "must begin as version 1 of trained tokens"),
        (lambda raw: raw[:16] + b"\5" + raw[17:], "bytes for 5 documents and"),
        (lambda raw: b"", "must begin as version 1"),
    ],
)
def test_a_damaged_file_is_refused(prefix, damage, problem):
    write(prefix, MASKS)
    path = prefix.parent / "out.mask"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(FormatError, match=problem):
        TrainedTokens.open(str(prefix))
    with pytest.raises(FormatError):
        verify_content(str(prefix))


def test_damaged_runs_are_found_where_they_are_read(prefix):
    write(prefix, MASKS)
    path = prefix.parent / "out.mask"
    raw = bytearray(path.read_bytes())
    raw[-8:-4] = (7).to_bytes(4, "little")  # the start of the last run
    path.write_bytes(raw)
    trained = TrainedTokens.open(str(prefix))
    with pytest.raises(FormatError, match="a run must lie in"):
        trained.of(3, 3)


def test_verify_misses_a_file_that_the_seal_names(prefix):
    write(prefix, MASKS)
    verify(str(prefix))
    (prefix.parent / "out.mask").unlink()
    with pytest.raises(FormatError, match="the seal says 96 bytes, found no file"):
        verify(str(prefix))


def test_verify_finds_a_mask_that_no_seal_names(prefix):
    write(prefix, MASKS)
    (prefix.parent / "out.trackbed.json").unlink()
    with pytest.raises(FormatError, match=r"out\.mask: the seal of the pair must name it, found none"):
        verify(str(prefix))
    (prefix.parent / "out.mask").unlink()
    verify(str(prefix))
