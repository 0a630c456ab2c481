import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.files.built_pair import build, names_in
from tests.support.files.indexed_pair import Pair
from trackbed.errors import ArgumentError
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, verify_content


def test_a_tiny_pair_has_these_bytes(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16, multimodal=True)
    builder.add_item([1, 2], mode=1)
    builder.add_item([], mode=-1)
    builder.end_document()
    builder.add_document([65535], [1])
    builder.finalize(f"{prefix}.idx")
    assert Path(f"{prefix}.bin").read_bytes() == b"\x01\x00\x02\x00\xff\xff"
    assert Path(f"{prefix}.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version
        b"\x08"  # uint16
        b"\x03\x00\x00\x00\x00\x00\x00\x00"  # sequences
        b"\x03\x00\x00\x00\x00\x00\x00\x00"  # document borders
        b"\x02\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00"  # lengths
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00\x04\x00\x00\x00\x00\x00\x00\x00"
        b"\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00"
        b"\x01\xff\x00"  # modes
    )


def test_the_seal_of_a_tiny_pair_says_this(prefix):
    build(prefix, [[1, 2], [3]], np.uint16)
    assert json.loads(Path(f"{prefix}.trackbed.json").read_text()) == {
        "format": "trackbed-seal",
        "version": 1,
        "dtype": "uint16",
        "sequences": 2,
        "documents": 2,
        "chunk_bytes": 67108864,
        "bin": {"size_bytes": 6, "crc32": ["fbbae94e"]},
        "idx": {"size_bytes": 82, "crc32": ["4319c1d6"]},
    }


@pytest.mark.parametrize("dtype", [np.uint32, np.bool_, np.float16, None])
def test_an_unsupported_type_is_refused(prefix, dtype):
    with pytest.raises(ArgumentError, match="dtype must be one of"):
        IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    assert names_in(prefix.parent) == []


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([], r"\[\]"),
        ([2], r"\[2\]"),
        ([4], r"\[4\]"),
        ([4, -1], r"\[4, -1\]"),
        ([-1, 4], r"\[-1, 4\]"),
        ([1.5, 1.5], r"\[1\.5, 1\.5\]"),
        ([3.0], r"\[3\.0\]"),
        (["3"], r"\['3'\]"),
        ([2**63], r"\[9223372036854775808\]"),
    ],
)
def test_lengths_that_do_not_divide_the_tokens_are_refused(prefix, lengths, found):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    with pytest.raises(ArgumentError, match=rf"out\.bin: lengths .*found {found}"):
        builder.add_document([1, 2, 3], lengths)
    builder.add_document([4], [1])
    builder.finalize(f"{prefix}.idx")
    assert IndexedDataset(str(prefix))[0].tolist() == [4]


def test_lengths_may_be_any_sequence_of_integers(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for lengths in ([2, 1], (2, 1), np.array([2, 1]), np.array([2, 1], dtype=np.int32), torch.tensor([2, 1])):
        builder.add_document([1, 2, 3], lengths)
    builder.finalize(f"{prefix}.idx")
    assert list(builder.sequence_lengths) == [2, 1] * 5
    assert list(builder.document_indices) == [0, 2, 4, 6, 8, 10]
    assert IndexedDataset(str(prefix)).sequence_lengths.tolist() == [2, 1] * 5


@pytest.mark.parametrize("modes", [[128], [-129], [300], [2**70]])
def test_a_mode_that_does_not_fit_a_byte_is_refused_at_once(prefix, modes):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", multimodal=True)
    with pytest.raises(ArgumentError, match=rf"modes must be in \[-128, 127\], found \[{modes[0]}\]"):
        builder.add_document([1], [1], modes)
    with pytest.raises(ArgumentError, match=f"found .*{modes[0]}"):
        builder.add_item([1], modes[0])
    builder.add_document([1], [1], [-128])
    builder.add_item([2], 127)
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    assert IndexedDataset(str(prefix), multimodal=True).sequence_modes.tolist() == [-128, 127]


def test_there_is_one_mode_per_sequence(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", multimodal=True)
    for modes in ([], [1], [1, 2, 3]):
        with pytest.raises(ArgumentError, match=f"one mode for each of 2 lengths, found {len(modes)}"):
            builder.add_document([1, 2], [1, 1], modes)
    builder.add_document([1, 2], [1, 1])
    builder.add_document([], [])
    builder.finalize(f"{prefix}.idx")
    assert IndexedDataset(str(prefix), multimodal=True).sequence_modes.tolist() == [0, 0]


def test_modes_are_ignored_in_a_plain_file(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document([1], [1], [1])
    builder.add_item([2], 1)
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    assert Path(f"{prefix}.idx").stat().st_size == 34 + 2 * 12 + 3 * 8


def test_an_empty_pair_is_whole(prefix):
    build(prefix, [])
    assert Path(f"{prefix}.bin").read_bytes() == b""
    assert verify_content(str(prefix)).documents == 0
    assert IndexedDataset(str(prefix))[:] == []


# Around the size at which the writer's buffer of 256 KiB is full.
@pytest.mark.parametrize("size", [65535, 65536, 65537, 131072, 200_001])
def test_documents_of_any_size_are_written_whole(prefix, size):
    documents = [np.arange(size, dtype=np.int32), np.array([7]), np.arange(65536)[::-1], np.arange(size)]
    build(prefix, documents)
    for found, wanted in zip(IndexedDataset(str(prefix))[:], documents, strict=True):
        assert np.array_equal(found, wanted)
    verify_content(str(prefix))


def test_a_pair_may_lie_in_two_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    builder = IndexedDatasetBuilder(str(tmp_path / "a" / "x.bin"))
    builder.add_document([1], [1])
    builder.finalize(str(tmp_path / "b" / "y.idx"))
    assert names_in(tmp_path / "a") == ["x.bin"]
    assert names_in(tmp_path / "b") == ["y.idx", "y.trackbed.json"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        IndexedDatasetBuilder(str(tmp_path / "none" / "x.bin"))


@pytest.mark.parametrize("name", ["text.document.v1.2", "with space", "näïve", "-x"])
def test_any_file_name_will_do(tmp_path, name):
    build(tmp_path / name, [[1, 2]])
    assert names_in(tmp_path) == sorted([f"{name}.bin", f"{name}.idx", f"{name}.trackbed.json"])
    verify_content(str(tmp_path / name))


def test_a_relative_path_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build(Path("x"), [[1, 2]])
    assert names_in(tmp_path) == ["x.bin", "x.idx", "x.trackbed.json"]
    assert verify_content("x").tokens == 2


@pytest.mark.slow
def test_a_sequence_too_long_for_the_format_is_refused_before_anything_is_appended(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint8)
    tokens = np.broadcast_to(np.uint8(0), 2**31)  # takes no memory
    for add in (builder.add_item, lambda many: builder.add_document(many, [2**31])):
        with pytest.raises(
            ArgumentError, match=rf"out\.bin: a sequence must have fewer than 2\*\*31 tokens, found {2**31}"
        ):
            add(tokens)
    builder.add_document([1], [1])
    builder.finalize(f"{prefix}.idx")
    assert verify_content(str(prefix)).tokens == 1


def test_the_pair_of_this_test_is_not_what_the_builder_wrote(pair):
    # The other tests rely on pairs encoded by the tests; this one compares them with the builder's.
    by_hand = pair.idx.read_bytes(), pair.bin.read_bytes()
    builder = IndexedDatasetBuilder(str(pair.bin))
    builder.add_document([5, 6, 7], [3, 0])
    builder.add_document([-1, 9], [2])
    builder.finalize(str(pair.idx))
    assert (pair.idx.read_bytes(), pair.bin.read_bytes()) == by_hand
    assert isinstance(pair, Pair)
