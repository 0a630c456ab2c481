import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from trackbed.errors import FormatError
from trackbed.tokens import IndexedDataset, open_index, verify
from trackbed.tokens.idx_header import HEADER_BYTES, Header, encode_header

# Sequences of 3, 0 and 2 int32 tokens in the documents [0, 2) and [2, 3), with the modes 1, 0 and -1.
GOLDEN_HEADER = (
    b"MMIDIDX\x00\x00"  # magic
    b"\x01\x00\x00\x00\x00\x00\x00\x00"  # version
    b"\x04"  # int32
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # sequences
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # document borders
)
GOLDEN = (
    GOLDEN_HEADER + b"\x03\x00\x00\x00"
    b"\x00\x00\x00\x00"
    b"\x02\x00\x00\x00"  # lengths
    b"\x00\x00\x00\x00\x00\x00\x00\x00"
    b"\x0c\x00\x00\x00\x00\x00\x00\x00"
    b"\x0c\x00\x00\x00\x00\x00\x00\x00"  # byte pointers
    b"\x00\x00\x00\x00\x00\x00\x00\x00"
    b"\x02\x00\x00\x00\x00\x00\x00\x00"
    b"\x03\x00\x00\x00\x00\x00\x00\x00"  # document borders
)
GOLDEN_MODES = b"\x01\x00\xff"


def refused(action, *words):
    """Assert that `action` raises a FormatError with all the words, quickly and without allocating memory."""
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(FormatError) as caught:
        action()
    seconds, (_, peak_bytes) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(str(word) in str(caught.value) for word in words), f"{caught.value} lacks one of {words}"
    assert seconds < 1
    assert peak_bytes < 1 << 20


def refused_by_all(pair, *words):
    """Assert that neither the index nor the dataset opens, and that verification fails."""
    refused(lambda: open_index(pair.idx), pair.idx, *words)
    refused(lambda: IndexedDataset(str(pair.prefix)), pair.idx, *words)
    refused(lambda: verify(str(pair.prefix)), pair.idx, *words)


def test_the_header_of_a_tiny_file_has_these_bytes():
    assert encode_header(Header(np.int32, 3, 3)) == GOLDEN_HEADER
    assert len(GOLDEN_HEADER) == HEADER_BYTES == 34


def test_a_tiny_index_is_read_from_these_bytes(tmp_path):
    (tmp_path / "a.idx").write_bytes(GOLDEN)
    index = open_index(tmp_path / "a.idx")
    assert index.dtype is np.int32
    assert index.dtype_size == 4
    assert (index.sequence_count, index.document_count) == (3, 3)
    assert index.sequence_lengths.tolist() == [3, 0, 2]
    assert index.sequence_pointers.tolist() == [0, 12, 12]
    assert index.document_indices.tolist() == [0, 2, 3]
    assert index.sequence_modes is None
    assert index.data_bytes == 20
    assert [tuple(index[i]) for i in range(len(index))] == [(0, 3, None), (12, 0, None), (12, 2, None)]


def test_modes_are_read_where_asked_for_and_otherwise_ignored(tmp_path):
    (tmp_path / "a.idx").write_bytes(GOLDEN + GOLDEN_MODES)
    index = open_index(tmp_path / "a.idx", multimodal=True)
    assert index.sequence_modes.tolist() == [1, 0, -1]
    assert tuple(index[2]) == (12, 2, -1)
    assert open_index(tmp_path / "a.idx").sequence_modes is None


def test_an_index_without_modes_is_not_multimodal(tmp_path):
    (tmp_path / "a.idx").write_bytes(GOLDEN)
    refused(
        lambda: open_index(tmp_path / "a.idx", multimodal=True),
        tmp_path / "a.idx",
        len(GOLDEN),
        len(GOLDEN) + 3,
        "modes",
    )


def test_the_arrays_cannot_be_written_to(pair):
    index = open_index(pair.idx)
    for array in (index.sequence_lengths, index.sequence_pointers, index.document_indices):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_arrays_outlive_the_index_and_the_file(pair):
    lengths = open_index(pair.idx).sequence_lengths
    pair.idx.unlink()
    assert lengths.tolist() == [3, 0, 2]


def test_an_index_without_sequences_is_whole(pair):
    replace(pair, lengths=[], borders=[0], tokens=[]).write()
    index = open_index(pair.idx)
    assert len(index) == 0
    assert index.data_bytes == 0
    assert index.document_indices.tolist() == [0]


def test_an_index_without_even_a_last_border_is_refused(pair):
    empty = replace(pair, lengths=[], borders=[], tokens=[]).write()
    assert empty.idx.stat().st_size == 34
    refused_by_all(empty, "document_count must be at least 1, found 0")


@pytest.mark.parametrize("magic", [b"MMIDIDX\x00\x01", b"mmididx\x00\x00", b"TNTIDX\x00\x00\x00", bytes(9)])
def test_another_magic_is_refused(pair, magic):
    refused_by_all(replace(pair, magic=magic).write(), b"MMIDIDX\x00\x00", magic)


@pytest.mark.parametrize("version", [0, 2, 256, 2**64 - 1])
def test_another_version_is_refused(pair, version):
    refused_by_all(replace(pair, version=version).write(), "version must be 1", f"found {version}")


@pytest.mark.parametrize("code", [0, 9, 255])
def test_an_unknown_dtype_code_is_refused(pair, code):
    refused_by_all(replace(pair, code=code).write(), "[1, 8]", f"found {code}")


HOSTILE_COUNTS = [0, 1, 2, 4, 5, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("count", HOSTILE_COUNTS)
def test_a_sequence_count_that_is_not_the_files_is_refused(pair, count):
    refused_by_all(replace(pair, sequence_count=count).write(), count, len(pair.encode()))


@pytest.mark.parametrize("count", HOSTILE_COUNTS)
def test_a_document_count_that_is_not_the_files_is_refused(pair, count):
    words = [count] if count == 0 else [count, len(pair.encode())]
    refused_by_all(replace(pair, document_count=count).write(), *words)


def test_counts_that_agree_with_the_size_and_not_with_the_borders_are_refused(pair):
    # Two more sequences and three fewer borders take equally many bytes, but the numbers there mean something else.
    lies = replace(pair, borders=[0, 1, 1, 2, 3, 3], sequence_count=5, document_count=3).write()
    assert lies.idx.stat().st_size == 34 + 12 * 5 + 8 * 3
    refused(lambda: IndexedDataset(str(pair.prefix)), pair.idx, "sequence_count 5")
    refused(lambda: verify(str(pair.prefix)), pair.idx)


def test_counts_whose_sizes_would_wrap_around_to_the_files_size_are_refused(pair):
    # 12 * 2**62 is 0 modulo 2**64, and so is 8 * 2**61.
    refused_by_all(replace(pair, sequence_count=3 + 2**62).write(), 3 + 2**62)
    refused_by_all(replace(pair, document_count=3 + 2**61).write(), 3 + 2**61)


@pytest.mark.parametrize("multimodal", [False, True])
def test_an_index_cut_off_anywhere_is_refused(pair, multimodal):
    whole = replace(pair, modes=[1, 0, -1] if multimodal else None).encode()
    for size in range(len(whole)):
        pair.idx.write_bytes(whole[:size])
        refused(lambda: open_index(pair.idx, multimodal=multimodal), pair.idx, size)
        with pytest.raises(FormatError):
            IndexedDataset(str(pair.prefix), multimodal=multimodal)


@pytest.mark.parametrize("extra", [1, 2, 4, 8, 12])
def test_trailing_bytes_are_refused(pair, extra):
    size = len(pair.encode())
    refused_by_all(replace(pair, trailing=bytes(extra)).write(), size, size + extra)


@pytest.mark.parametrize("extra", [-3, -1, 1, 3])
def test_modes_that_are_not_one_a_sequence_are_refused(pair, extra):
    replace(pair, modes=[0] * (3 + extra)).write()
    refused(lambda: open_index(pair.idx, multimodal=True), pair.idx, len(pair.encode()) + 3 + extra)


def read_everything(prefix, **options):
    dataset = IndexedDataset(str(prefix), **options)
    for number in range(len(dataset)):
        dataset[number]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lengths": [3, -1, 3]}, ["sequence 1", "at least 0", -1]),
        ({"lengths": [3, -(2**31), 2]}, ["sequence 1", "at least 0", -(2**31)]),
        ({"lengths": [-1, 0, 2]}, ["sequence 0", "at least 0", -1]),
        ({"pointers": [0, 12, -4]}, ["sequence 2", 12, -4]),
        ({"pointers": [-4, 12, 12]}, ["sequence 0", 0, -4]),
        ({"pointers": [-(2**63), 12, 12]}, ["sequence 0", 0, -(2**63)]),
        ({"pointers": [2**63 - 1, 12, 12]}, ["sequence 0", 0, 2**63 - 1]),
        ({"pointers": [0, 12, 2**63 - 1]}, ["sequence 2", 12, 2**63 - 1]),
        ({"pointers": [0, 12, 13]}, ["sequence 2", 12, 13]),
        ({"pointers": [4, 12, 12]}, ["sequence 0", 0, 4]),
        ({"pointers": [0, 0, 12]}, ["sequence 1", 12, 0]),
        ({"borders": [1, 2, 3]}, ["from 0 to the sequence_count 3", "1 to 3"]),
        ({"borders": [-1, 2, 3]}, ["from 0 to the sequence_count 3", "-1 to 3"]),
        ({"borders": [0, 2, 2]}, ["from 0 to the sequence_count 3", "0 to 2"]),
        ({"borders": [0, 2, 4]}, ["from 0 to the sequence_count 3", "0 to 4"]),
        ({"borders": [0, 4, 3]}, ["border 2", 4, "found 3"]),
        ({"borders": [0, -1, 3]}, ["border 1", "at least 0", -1]),
        ({"borders": [0, 2, 1, 3]}, ["border 2", "at least 2", "found 1"]),
        ({"borders": [0, 2**63 - 1, -(2**63), 3]}, ["border 2", 2**63 - 1, -(2**63)]),
    ],
)
def test_numbers_that_contradict_each_other_are_found_by_verify(pair, changes, words):
    replace(pair, **changes).write()
    refused(lambda: verify(str(pair.prefix)), pair.idx, *words)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": [3, -1, 2]},
        {"lengths": [3, 0, 2**31 - 1]},
        {"lengths": [2**31 - 1, 0, 2]},
        {"pointers": [0, 12, -4]},
        {"pointers": [-4, 12, 12]},
        {"pointers": [-(2**63), 12, 12]},
        {"pointers": [2**63 - 1, 12, 12]},
        {"pointers": [0, 21, 12]},
        {"tokens": [5, 6, 7, -1]},
        {"tokens": []},
    ],
)
def test_a_sequence_that_is_not_in_the_data_cannot_be_read(pair, changes, mmap):
    replace(pair, **changes).write()
    refused(lambda: read_everything(pair.prefix, mmap=mmap), pair.prefix)
    refused(lambda: read_everything(pair.prefix, mmap=mmap, fast_cache_load=True), pair.prefix)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("part", [slice(None), slice(0, 2), slice(1, 3), slice(1, 2)])
def test_a_part_with_a_negative_length_cannot_be_read(pair, mmap, part):
    # The sum of the lengths is that of the data.
    replace(pair, lengths=[3, -1, 3], pointers=[0, 12, 8]).write()
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    refused(lambda: dataset[part], pair.prefix, -1)


def test_a_long_index_is_verified_in_steps(pair):
    count = 2 * 2**20 + 3
    lengths, borders = np.full(count, 2, dtype=np.int32), np.arange(count + 1)
    raw = encode_header(Header(np.uint8, count, count + 1)) + lengths.tobytes()
    pair.idx.write_bytes(raw + (2 * borders[:-1]).tobytes() + borders.tobytes())
    pair.bin.write_bytes(bytes(2 * count))
    assert verify(str(pair.prefix)).tokens == 2 * count


def test_data_of_another_size_than_the_sequences_is_refused_by_verify(pair):
    for extra in (1, 4):
        pair.bin.write_bytes(bytes(20 + extra))
        refused(lambda: verify(str(pair.prefix)), pair.bin, "5 tokens", 20, 20 + extra)
    pair.bin.write_bytes(bytes(16))
    refused(lambda: verify(str(pair.prefix)), pair.bin, 20, 16)
    refused(lambda: IndexedDataset(str(pair.prefix)), pair.idx, 20, 16)


def test_a_wrong_border_between_two_steps_of_the_check_is_found(pair):
    # The check works in steps of 2**20 numbers; the decrease lies between two steps.
    count = 2**20 + 5
    borders = np.arange(count + 1)
    borders[2**20] = 2**20 - 2
    raw = encode_header(Header(np.int32, count, count + 1))
    raw += bytes(4 * count) + bytes(8 * count) + borders.tobytes()
    pair.idx.write_bytes(raw)
    pair.bin.write_bytes(b"")
    with pytest.raises(FormatError, match=f"border {2**20} must be at least {2**20 - 1}, found {2**20 - 2}"):
        verify(str(pair.prefix))


def test_a_wrong_offset_between_two_steps_of_the_check_is_found(pair):
    count = 2**20 + 5
    lengths = np.ones(count, dtype=np.int32)
    pointers = np.arange(count) * 4
    borders = np.array([0, count])
    for damaged in (2**20 - 1, 2**20, 2**20 + 4):
        wrong = pointers.copy()
        wrong[damaged] += 4
        raw = encode_header(Header(np.int32, count, 2)) + lengths.tobytes() + wrong.tobytes() + borders.tobytes()
        pair.idx.write_bytes(raw)
        pair.bin.write_bytes(bytes(4 * count))
        with pytest.raises(FormatError, match=f"sequence {damaged} must be {4 * damaged}, found {4 * damaged + 4}"):
            verify(str(pair.prefix))
