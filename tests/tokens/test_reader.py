import copy
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.files.indexed_pair import CODES, Pair
from tests.support.processes.forked import run_in_fork
from tests.support.tiers import with_files
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDataset, ObjectStorageConfig

both = pytest.mark.parametrize("mmap", [True, False])


def lists(sequences):
    return [sequence.tolist() for sequence in sequences]


@st.composite
def sequences_of(draw, dtype):
    """Up to eight sequences of numbers that fit `dtype`."""
    if np.dtype(dtype).kind == "f":
        numbers = st.floats(width=8 * np.dtype(dtype).itemsize, allow_nan=False)
    else:
        numbers = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return draw(st.lists(st.lists(numbers, max_size=6), max_size=8))


@both
@pytest.mark.parametrize("dtype", CODES)
@with_files
@given(data=st.data())
def test_sequences_of_every_type_are_read_as_they_were_written(tmp_path, dtype, mmap, data):
    sequences = data.draw(sequences_of(dtype))
    pair = Pair(
        tmp_path / "corpus",
        lengths=[len(sequence) for sequence in sequences],
        borders=[0, len(sequences)],
        tokens=[token for sequence in sequences for token in sequence],
        dtype=dtype,
    )
    for path in (pair.bin, pair.idx):
        path.unlink(missing_ok=True)  # the last example may still be mapped
    pair.write()
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    assert len(dataset) == len(sequences)
    assert lists(dataset[:]) == lists(dataset[i] for i in range(len(dataset))) == sequences
    assert all(sequence.dtype == dtype and sequence.ndim == 1 for sequence in dataset[:])


@both
@given(start=st.none() | st.integers(-5, 5), stop=st.none() | st.integers(-5, 5), step=st.sampled_from([None, 1]))
def test_a_slice_is_what_a_list_would_give(pair, mmap, start, stop, step):
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    assert lists(dataset[start:stop:step]) == pair.sequences()[start:stop:step]


@both
def test_numbers_count_from_either_end_and_may_be_numpys(pair, mmap):
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    wanted = pair.sequences()
    for number in range(-3, 3):
        for kind in (int, np.int8, np.int32, np.int64):
            assert dataset[kind(number)].tolist() == wanted[number]
            assert dataset.get(kind(number)).tolist() == wanted[number]
    assert dataset[np.uint64(2)].tolist() == wanted[2]


@both
@pytest.mark.parametrize("number", [3, -4, 2**31, 2**63, 2**70, -(2**70)])
def test_a_sequence_out_of_range_is_refused(pair, mmap, number):
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    with pytest.raises(IndexError):
        dataset[number]
    with pytest.raises(IndexError):
        dataset.get(number)


@pytest.mark.parametrize("index", ["0", None, 0.0, [0], (0, 1), np.array([0]), np.array(0)])
def test_only_numbers_and_slices_are_indices(pair, index):
    with pytest.raises(TypeError, match="an index must be an integer or a slice"):
        IndexedDataset(str(pair.prefix))[index]


@pytest.mark.parametrize("step", [2, -1, 3])
def test_a_slice_takes_no_step(pair, step):
    with pytest.raises(ValueError, match=f"step of {step}"):
        IndexedDataset(str(pair.prefix))[::step]


@both
@pytest.mark.parametrize(
    ("number", "offset", "length", "wanted"),
    [
        (0, 0, None, [5, 6, 7]),
        (0, 1, None, [6, 7]),
        (0, 3, None, []),
        (0, 0, 2, [5, 6]),
        (0, 1, 1, [6]),
        (0, 0, 0, []),
        (1, 0, None, []),
        (2, 1, None, [9]),
        (-1, 0, 1, [-1]),
        # As in Megatron Core, a range may extend into the following sequences.
        (0, 2, 3, [7, -1, 9]),
        (1, 0, 2, [-1, 9]),
        (1, 2, 0, []),
    ],
)
def test_a_part_of_a_sequence_is_read(pair, mmap, number, offset, length, wanted):
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    assert dataset.get(number, offset, length).tolist() == wanted
    assert dataset.get(number, offset=offset, length=length).tolist() == wanted
    if length is not None:
        assert dataset.get(np.int64(number), np.int32(offset), np.int64(length)).tolist() == wanted


@both
@pytest.mark.parametrize(
    ("number", "offset", "length"),
    [(0, 0, 6), (0, 4, None), (0, -1, 1), (2, 0, 3), (2, 2, 1), (0, 0, -1), (0, 0, 2**62), (2, 2**61, 1), (0, 3, -2)],
)
def test_a_part_outside_the_file_cannot_be_read(pair, mmap, number, offset, length):
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    words = r"corpus: offset and length must name tokens of the file, which has 5, but tokens \[.* are asked for"
    for kind in (ArgumentError, FormatError):
        with pytest.raises(kind, match=f"{words}, which has {len(dataset[number])}"):
            dataset.get(number, offset, length)


def test_an_offset_past_the_end_of_a_sequence_needs_a_length(pair):
    dataset = IndexedDataset(str(pair.prefix))
    assert dataset.get(0, 3, 1).tolist() == dataset[2][:1].tolist()
    with pytest.raises(ArgumentError, match=r"tokens \[4, 3\) of sequence 0 are asked for, which has 3"):
        dataset.get(0, 4)


def test_a_pair_is_opened_again_under_either_name_of_the_options_of_a_store(pair):
    dataset = IndexedDataset(str(pair.prefix))
    dataset.initialize(str(pair.prefix), multimodal=False, mmap=True, s3_config=None)
    assert lists(dataset[:]) == pair.sequences()
    options = ObjectStorageConfig(path_to_idx_cache=str(pair.prefix.parent))
    for name in ("s3_config", "object_storage_config"):
        dataset.initialize(str(pair.prefix), multimodal=False, mmap=False, **{name: options})
        assert dataset.object_storage_config is options


@both
def test_modes_come_with_their_sequences(pair, mmap):
    modal = replace(pair, modes=[1, 0, -128]).write()
    dataset = IndexedDataset(str(modal.prefix), multimodal=True, mmap=mmap)
    assert dataset.sequence_modes.tolist() == [1, 0, -128]
    tokens, mode = dataset[-1]
    assert (tokens.tolist(), mode, mode.dtype) == ([-1, 9], -128, np.int8)
    tokens, mode = dataset.get(0, 1, 1)
    assert (tokens.tolist(), mode) == ([6], 1)
    some, modes = dataset[0:2]
    assert (lists(some), modes.tolist()) == ([[5, 6, 7], []], [1, 0])
    none, modes = dataset[2:1]
    assert (none, modes.tolist()) == ([], [])


def test_modes_are_left_out_unless_asked_for(pair):
    dataset = IndexedDataset(str(replace(pair, modes=[1, 0, -1]).write().prefix))
    assert dataset[0].tolist() == [5, 6, 7]
    with pytest.raises(ArgumentError, match="multimodal=True"):
        _ = dataset.sequence_modes


def test_lengths_and_borders_are_arrays(pair):
    dataset = IndexedDataset(str(pair.prefix))
    assert (dataset.sequence_lengths.dtype, dataset.sequence_lengths.tolist()) == (np.int32, [3, 0, 2])
    assert (dataset.document_indices.dtype, dataset.document_indices.tolist()) == (np.int64, [0, 2, 3])
    assert dataset.get_document_indices() is dataset.document_indices
    assert (dataset.index.sequence_count, dataset.index.document_count) == (3, 3)


def test_other_borders_can_be_used(pair):
    dataset = IndexedDataset(str(pair.prefix))
    dataset.set_document_indices(np.array([0, 3]))
    assert dataset.document_indices.tolist() == [0, 3]
    assert IndexedDataset(str(pair.prefix)).document_indices.tolist() == [0, 2, 3]


@both
@pytest.mark.parametrize(("lengths", "borders"), [([], [0]), ([], [0, 0]), ([0], [0, 1]), ([0, 0], [0, 0, 2])])
def test_a_file_without_tokens_is_whole(pair, mmap, lengths, borders):
    empty = replace(pair, lengths=lengths, borders=borders, tokens=[]).write()
    assert empty.bin.stat().st_size == 0
    dataset = IndexedDataset(str(empty.prefix), mmap=mmap)
    assert lists(dataset[:]) == [[] for _ in lengths]
    assert [dataset[i].dtype for i in range(len(dataset))] == [np.int32] * len(lengths)
    with pytest.raises(IndexError):
        dataset[len(lengths)]


def test_both_files_must_exist(pair):
    assert IndexedDataset.exists(str(pair.prefix))
    pair.idx.unlink()
    assert not IndexedDataset.exists(str(pair.prefix))
    with pytest.raises(ArgumentError, match=r"missing .*corpus\.idx$"):
        IndexedDataset(str(pair.prefix))
    pair.bin.unlink()
    with pytest.raises(AssertionError, match=r"missing .*corpus\.idx and .*corpus\.bin$"):
        IndexedDataset(str(pair.prefix))
    pair.write().bin.unlink()
    assert not IndexedDataset.exists(str(pair.prefix))


@pytest.mark.parametrize("name", ["object_storage_config", "s3_config"])
def test_options_of_object_stores_have_one_class(pair, name):
    with pytest.raises(
        ArgumentError, match="object_storage_config must be an ObjectStorageConfig or None, found a object"
    ):
        IndexedDataset(str(pair.prefix), mmap=False, **{name: object()})


def test_the_counts_given_must_be_those_of_the_file(pair):
    for counts in ((3, 3), [3, 3], (np.int64(3), np.int64(3))):
        dataset = IndexedDataset(str(pair.prefix), sequences_per_dataset=counts, dtype_code=8)
        assert dataset[0].dtype == np.int32  # as the header says
    for counts in ((2, 3), (3, 2), (3, 4)):
        with pytest.raises(FormatError, match=rf"corpus\.idx: .*\({counts[0]}, {counts[1]}\).*found \(3, 3\)"):
            IndexedDataset(str(pair.prefix), sequences_per_dataset=counts)


def test_the_ends_are_checked_at_opening_unless_told_otherwise(pair):
    wrong = replace(pair, borders=[0, 2, 2]).write()
    with pytest.raises(FormatError, match="last document border must be the sequence_count 3, found 2"):
        IndexedDataset(str(wrong.prefix))
    assert IndexedDataset(str(wrong.prefix), fast_cache_load=True)[0].tolist() == [5, 6, 7]


@both
def test_reads_from_a_map_return_views_and_others_copies(pair, mmap):
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    for tokens in (dataset[0], dataset[:][0], dataset.get(0, 1)):
        assert tokens.flags.writeable is not mmap
    assert np.shares_memory(dataset[0], dataset[0]) is mmap


@both
def test_a_pickled_dataset_is_small_and_opens_the_files_again(pair, mmap):
    modal = replace(pair, modes=[1, 0, -1]).write()
    dataset = IndexedDataset(str(modal.prefix), multimodal=True, mmap=mmap, sequences_per_dataset=(3, 3))
    raw = pickle.dumps(dataset)
    assert len(raw) < 1000
    del dataset
    again = pickle.loads(raw)
    assert (again.multimodal, again.mmap, again.sequences_per_dataset) == (True, mmap, (3, 3))
    assert lists(again[:][0]) == pair.sequences()


@both
def test_unpickling_without_the_files_is_an_error(pair, mmap):
    raw = pickle.dumps(IndexedDataset(str(pair.prefix), mmap=mmap))
    pair.bin.unlink()
    with pytest.raises(ArgumentError, match=r"corpus\.bin"):
        pickle.loads(raw)


@both
def test_a_copy_reads_on_when_the_original_is_gone(pair, mmap):
    for duplicate in (copy.copy, copy.deepcopy):
        dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
        other = duplicate(dataset)
        del dataset
        gc.collect()
        assert lists(other[:]) == pair.sequences()


@both
def test_a_fresh_process_reads_a_pickled_dataset(pair, mmap):
    program = "import pickle, sys; print([list(map(int, s)) for s in pickle.load(sys.stdin.buffer)[:]])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(IndexedDataset(str(pair.prefix), mmap=mmap)),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == str(pair.sequences())


@both
def test_a_forked_process_reads_on_and_so_does_its_parent(pair, mmap):
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    held = dataset[2]

    def read_and_drop():
        nonlocal dataset
        found = [*lists(dataset[:]), held.tolist()]
        del dataset  # closes the child's file, not the parent's
        gc.collect()
        return found

    for _ in range(2):
        assert run_in_fork(read_and_drop) == [*pair.sequences(), [-1, 9]]
        assert lists(dataset[:]) == pair.sequences()


@both
def test_threads_read_side_by_side(tmp_path, mmap):
    count = 500
    tokens = np.repeat(np.arange(count), 20)
    pair = Pair(tmp_path / "corpus", lengths=[20] * count, borders=[0, count], tokens=tokens.tolist()).write()
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    wrong = []

    def read(first):
        wrong.extend(n for n in range(first, count) for _ in range(3) if set(dataset[n].tolist()) != {n})

    threads = [threading.Thread(target=read, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@both
def test_arrays_stay_valid_when_dataset_and_files_are_gone(pair, mmap):
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    one, some, lengths = dataset[0], dataset[:], dataset.sequence_lengths
    del dataset
    gc.collect()
    for path in (pair.bin, pair.idx):
        other = path.with_suffix(".other")
        other.write_bytes(bytes(path.stat().st_size))
        other.replace(path)
    assert one.tolist() == [5, 6, 7]
    assert lists(some) == pair.sequences()
    assert lengths.tolist() == [3, 0, 2]


@both
def test_an_open_dataset_reads_the_old_files_when_new_ones_take_their_names(pair, mmap):
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap)
    newer = Pair(pair.prefix.with_name("newer"), lengths=[1], borders=[0, 1], tokens=[77]).write()
    newer.bin.replace(pair.bin)
    newer.idx.replace(pair.idx)
    assert lists(dataset[:]) == pair.sequences()
    assert lists(IndexedDataset(str(pair.prefix), mmap=mmap)[:]) == [[77]]


def test_a_plain_file_that_is_cut_shorter_in_place_raises(pair):
    dataset = IndexedDataset(str(pair.prefix), mmap=False)
    os.truncate(pair.bin, 14)
    assert dataset[0].tolist() == [5, 6, 7]
    with pytest.raises(FormatError, match=r"corpus\.bin: .*\[12, 20\).* has 14"):
        dataset[2]
    with pytest.raises(FormatError, match=r"corpus\.bin: .*\[0, 20\).* has 14"):
        dataset[:]


def open_files():
    return [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def test_the_file_is_closed_when_the_dataset_is_gone(pair):
    dataset = IndexedDataset(str(pair.prefix), mmap=False)
    assert str(pair.bin) in open_files()
    del dataset
    gc.collect()
    assert str(pair.bin) not in open_files()


# Prints the time of the fastest of five openings in seconds, and the private bytes that the first one took.
OPEN = """
import re, sys, time
from pathlib import Path
from trackbed.tokens import IndexedDataset

def private_bytes():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(1024 * int(kib) for kib in re.findall(r"Private_\\w+: +(\\d+) kB", rollup))

before = private_bytes()
dataset = IndexedDataset(sys.argv[1], mmap=sys.argv[2] == "True")
after = private_bytes()
seconds = []
for _ in range(5):
    start = time.perf_counter()
    IndexedDataset(sys.argv[1], mmap=sys.argv[2] == "True")
    seconds.append(time.perf_counter() - start)
print(len(dataset), min(seconds), after - before)
"""


@both
def test_opening_costs_neither_time_nor_memory_by_document(tmp_path, mmap):
    count = 20_000_000
    header = Pair(
        tmp_path / "corpus", lengths=[], borders=[], tokens=[], sequence_count=count, document_count=count + 1
    )
    size = 34 + 12 * count + 8 * (count + 1)
    with header.idx.open("wb") as file:
        file.write(header.encode())
        file.truncate(size)
        file.seek(size - 8)
        file.write(count.to_bytes(8, "little"))
    header.bin.write_bytes(b"")
    command = [sys.executable, "-c", OPEN, str(header.prefix), str(mmap)]
    found, seconds, private_bytes = subprocess.run(command, capture_output=True, check=True).stdout.split()
    assert int(found) == count
    assert float(seconds) < 0.05
    assert int(private_bytes) < 5 << 20


@pytest.mark.parametrize("mmap", [True, False])
def test_a_pair_with_open_when_read_takes_no_descriptor_and_no_map_until_then(pair, mmap):
    before = len(open_files())
    dataset = IndexedDataset(str(pair.prefix), mmap=mmap, open_when_read=True)
    mapped = Path("/proc/self/maps").read_text()
    assert len(open_files()) == before
    assert str(pair.idx) not in mapped
    assert str(pair.bin) not in mapped
    whole = IndexedDataset(str(pair.prefix))
    assert (len(dataset), dataset.identity) == (len(whole), whole.identity)
    assert [tokens.tolist() for tokens in dataset[:]] == [tokens.tolist() for tokens in whole[:]]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_replaced_before_it_is_read_is_an_error(pair, tmp_path, suffix):
    dataset = IndexedDataset(str(pair.prefix), open_when_read=True)
    path = pair.prefix.with_suffix(suffix)
    shutil.copy(path, tmp_path / "other")
    (tmp_path / "other").replace(path)
    with pytest.raises(FormatError, match=f"{suffix}: the file must be the one that was opened, found another one"):
        dataset.get(0)
    path.unlink()
    with pytest.raises(FormatError, match="found nothing"):
        dataset.get(0)
