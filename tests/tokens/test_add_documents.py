"""Tests of `add_documents`."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.built_pair import build, names_in
from tests.support.tiers import with_files
from trackbed.errors import ArgumentError
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, verify_content

DTYPES = [np.uint16, np.int32, np.int64, np.uint8, np.float32]


def files_of(prefix):
    return [Path(f"{prefix}.{end}").read_bytes() for end in ("bin", "idx", "trackbed.json")]


@with_files
@given(
    calls=st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=5),
    stored=st.sampled_from(DTYPES),
    given_as=st.sampled_from([np.uint8, np.uint16, np.int32, np.int64]),
    single=st.booleans(),
)
def test_add_documents_writes_the_same_bytes_as_add_document(tmp_path, calls, stored, given_as, single):
    many, each = tmp_path / "many", tmp_path / "each"
    documents = [np.arange(length, dtype=given_as) for lengths in calls for length in lengths]
    build(each, [[7]] * single + documents, stored)
    builder = IndexedDatasetBuilder(f"{many}.bin", stored)
    if single:
        builder.add_document([7], [1])
    remaining = iter(documents)
    for lengths in calls:
        tokens = [np.empty(0, dtype=given_as), *itertools.islice(remaining, len(lengths))]
        builder.add_documents(np.concatenate(tokens), lengths)
    builder.finalize(f"{many}.idx")
    assert files_of(many) == files_of(each)


# Around the sizes from which tokens are written without a copy, and the checksum is computed on a second thread.
@pytest.mark.parametrize(
    "size",
    [
        (1 << 16) - 1,
        1 << 16,
        (1 << 17) + 1,
        (1 << 21) - 1,
        (1 << 21) + 1,
        pytest.param(40 << 20, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("given_as", [np.uint16, np.int64])
def test_calls_of_any_size_are_written_whole(prefix, size, given_as):
    tokens = (np.arange(size, dtype=np.uint32) % 65_000).astype(given_as)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.add_document([1, 2, 3], [3])
    builder.add_documents(tokens, [size - 10, 10])
    builder.add_document([4], [1])
    builder.finalize(f"{prefix}.idx")
    assert np.array_equal(np.fromfile(f"{prefix}.bin", dtype=np.uint16), [1, 2, 3, *tokens, 4])
    assert IndexedDataset(str(prefix)).sequence_lengths.tolist() == [3, size - 10, 10, 1]
    verify_content(str(prefix))


def test_tokens_and_lengths_may_be_arrays_tensors_or_lists(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    tokens = [1, 2, 3]
    for made in (list, tuple, np.array, torch.tensor, lambda numbers: np.repeat(numbers, 2)[::2]):
        builder.add_documents(made(tokens), made([2, 0, 1]))
    builder.add_documents([], [])
    builder.add_documents([], [0, 0])
    builder.finalize(f"{prefix}.idx")
    assert [document.tolist() for document in IndexedDataset(str(prefix))[:]] == [[1, 2], [], [3]] * 5 + [[], []]
    verify_content(str(prefix))


def test_large_token_arrays_need_not_be_contiguous(prefix):
    tokens = np.arange(400_000, dtype=np.int32)
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_documents(tokens[::2], [200_000])
    builder.finalize(f"{prefix}.idx")
    assert np.array_equal(IndexedDataset(str(prefix))[0], tokens[::2])


def test_the_documents_of_a_multimodal_file_get_mode_0(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", multimodal=True)
    builder.add_document([1], [1], [5])
    builder.add_documents([1, 2, 3], [2, 1])
    builder.finalize(f"{prefix}.idx")
    assert IndexedDataset(str(prefix), multimodal=True).sequence_modes.tolist() == [5, 0, 0]


@with_files
@given(
    calls=st.lists(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(-128, 127)), max_size=4)), max_size=4),
    multimodal=st.booleans(),
)
def test_documents_of_several_sequences_are_those_of_add_document(tmp_path, calls, multimodal):
    many, each = (IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), np.int32, multimodal) for name in ("m", "e"))
    for documents in calls:
        sequences = [sequence for document in documents for sequence in document]
        lengths, modes = [length for length, _ in sequences], [mode for _, mode in sequences]
        tokens = np.arange(sum(lengths), dtype=np.int32)
        many.add_documents(tokens, lengths, counts=[len(document) for document in documents], modes=modes)
        for document in documents:
            own, tokens = np.split(tokens, [sum(length for length, _ in document)])
            each.add_document(own, [length for length, _ in document], [mode for _, mode in document])
    many.finalize(str(tmp_path / "m.idx"))
    each.finalize(str(tmp_path / "e.idx"))
    assert files_of(tmp_path / "m") == files_of(tmp_path / "e")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"counts": [1]}, r"counts must add up to the 2 sequences, found 1"),
        ({"counts": [3, -1]}, r"the number of sequences of document 1 must be in \[0, 2\*\*31\), found -1"),
        ({"counts": [0.5, 1.5]}, r"counts must be integers in one dimension, found float64\[2\]"),
        ({"modes": [1]}, r"one integer mode for each of 2 sequences, found int64\[1\]"),
        ({"modes": [1.0, 2.0]}, r"one integer mode for each of 2 sequences, found float64\[2\]"),
        ({"modes": [1, 128]}, r"modes must be in \[-128, 127\], found 1 to 128"),
    ],
)
def test_counts_and_modes_that_do_not_match_are_refused_before_anything_is_appended(prefix, options, found):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", multimodal=True)
    with pytest.raises(ArgumentError, match=rf"out\.bin: .*{found}"):
        builder.add_documents([1, 2, 3], [2, 1], **options)
    builder.add_document([4], [1])
    builder.finalize(f"{prefix}.idx")
    assert [document.tolist() for document in IndexedDataset(str(prefix))[:]] == [[4]]


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([2], r"add up to the 3 tokens, found 2"),
        ([2, 2], r"add up to the 3 tokens, found 4"),
        ([], r"add up to the 3 tokens, found 0"),
        ([1, 3, -1], r"length of sequence 2 must be in \[0, 2\*\*31\), found -1"),
        ([2**31], r"length of sequence 0 must be in \[0, 2\*\*31\), found 2147483648"),
        ([1.5, 1.5], r"integers in one dimension, found float64\[2\]"),
        ([["3"]], r"integers in one dimension, found"),
        ([[1], [2]], r"integers in one dimension, found int64\[2, 1\]"),
        (3, r"integers in one dimension, found int64\[\]"),
    ],
)
def test_lengths_that_do_not_divide_the_tokens_are_refused_before_anything_is_appended(prefix, lengths, found):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    with pytest.raises(ArgumentError, match=rf"out\.bin: .*{found}"):
        builder.add_documents([1, 2, 3], lengths)
    builder.add_document([4], [1])
    builder.finalize(f"{prefix}.idx")
    assert [document.tolist() for document in IndexedDataset(str(prefix))[:]] == [[4]]


@pytest.mark.parametrize("size", [10, 5_000_000])
def test_a_token_that_does_not_fit_is_refused_before_anything_is_appended(prefix, size):
    tokens = np.zeros(size, dtype=np.int64)
    tokens[-1] = 70_000
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    with pytest.raises(ArgumentError, match=r"out\.bin: .*uint16, found 70000"):
        builder.add_documents(tokens, [size])
    builder.add_documents([4], [1])
    builder.finalize(f"{prefix}.idx")
    assert [document.tolist() for document in IndexedDataset(str(prefix))[:]] == [[4]]


def test_nothing_is_appended_after_the_end(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.discard()
    with pytest.raises(ArgumentError, match="must not be used after finalize or discard"):
        builder.add_documents([1], [1])
    assert names_in(prefix.parent) == []


@pytest.mark.parametrize("eod_token", [None, 7])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_ragged_array_is_taken_as_newer_megatron_core_gives_it(tmp_path, eod_token, chunk_size):
    awkward = pytest.importorskip("awkward")
    documents, modes = [[1, 2], [], [3], [4, 5, 6], [8]], [0, 1, 2, 3, 4]
    for name, multimodal in (("text", False), ("images", True)):
        builder = IndexedDatasetBuilder(f"{tmp_path}/{name}.bin", np.uint16, multimodal)
        builder.add_documents(awkward.Array(documents), modes, eod_token, *([chunk_size] if chunk_size else []))
        builder.finalize(f"{tmp_path}/{name}.idx")
        found = IndexedDataset(f"{tmp_path}/{name}", multimodal)
        end = [] if eod_token is None else [eod_token]
        texts = [list(one[0] if multimodal else one) for one in (found[at] for at in range(len(found)))]
        assert texts == [[*document, *end] for document in documents]
        assert found.document_indices.tolist() == [*range(6)]
        if multimodal:
            assert found.sequence_modes.tolist() == modes


def test_what_only_a_ragged_array_has_is_refused_for_others(tmp_path):
    builder = IndexedDatasetBuilder(f"{tmp_path}/a.bin")
    with pytest.raises(ArgumentError, match="only of a ragged array, found list"):
        builder.add_documents([1, 2])
    with pytest.raises(ArgumentError, match="only of a ragged array, found list"):
        builder.add_documents([1, 2], [2], 7)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chunk_size": -1}, "chunk_size must be a whole number of at least 1, found -1"),
        ({"chunk_size": 0}, "chunk_size must be a whole number of at least 1, found 0"),
        ({"eod_token": 1.9}, "eod_token must be a whole number, found 1.9"),
        ({"eod_token": 1 << 16}, "65536"),
        ({"counts": [2]}, "counts must be None for a ragged array"),
        ({"modes": [1, 1, 1]}, "a mode for each of 2 documents, found 3"),
    ],
)
def test_wrong_options_of_a_ragged_array_are_refused_and_nothing_is_appended(options, reason, tmp_path):
    awkward = pytest.importorskip("awkward")
    builder = IndexedDatasetBuilder(str(tmp_path / "a.bin"), np.uint16, multimodal=True)
    with pytest.raises(ArgumentError, match=reason):
        builder.add_documents(awkward.Array([[1, 2], [3]]), **options)
    with pytest.raises(ArgumentError):
        builder.add_documents(awkward.Array([[1, 2], [70_000]]), chunk_size=1)
    with pytest.raises(ArgumentError, match="must be a ragged array"):
        builder.add_documents(awkward.Array([1, 2]))
    builder.add_documents(awkward.Array([[], []]), eod_token=7)
    builder.finalize(str(tmp_path / "a.idx"))
    assert [one[0].tolist() for one in IndexedDataset(str(tmp_path / "a"), multimodal=True)] == [[7], [7]]
