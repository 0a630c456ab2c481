import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forked import run_in_fork
from indexed_pair import CODES, Pair
from tiers import with_files
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder, verify, verify_content

INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]


@pytest.fixture
def prefix(tmp_path):
    return tmp_path / "out"


def build(prefix, documents, dtype=np.int32, **options):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype, **options)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")


def files(folder):
    return sorted(path.name for path in folder.iterdir())


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


@st.composite
def documents_of(draw, dtype):
    """Documents of sequences of numbers that `dtype` holds."""
    if np.dtype(dtype).kind == "f":
        numbers = st.floats(width=8 * np.dtype(dtype).itemsize, allow_nan=False)
    else:
        numbers = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return draw(st.lists(st.lists(st.lists(numbers, max_size=5), max_size=4), max_size=5))


FORMS = {
    "list": lambda tokens, dtype: tokens,
    "tuple": lambda tokens, dtype: tuple(tokens),
    "array": lambda tokens, dtype: np.array(tokens, dtype=dtype),
    "strided array": lambda tokens, dtype: np.repeat(np.array(tokens, dtype=dtype), 2)[::2],
    "read-only array": lambda tokens, dtype: np.frombuffer(np.array(tokens, dtype=dtype).tobytes(), dtype=dtype),
    "foreign byte order": lambda tokens, dtype: np.array(tokens, dtype=np.dtype(dtype).newbyteorder(">")),
    "tensor": lambda tokens, dtype: torch.from_numpy(np.array(tokens, dtype=dtype)),
}


@pytest.mark.parametrize("form", FORMS)
@with_files
@given(data=st.data())
def test_what_is_written_is_read_back(prefix, form, data):
    dtype = data.draw(st.sampled_from(sorted(CODES)))
    documents = data.draw(documents_of(dtype))
    by_item = data.draw(st.booleans())
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(dtype).type)
    for document in documents:
        if by_item:
            for sequence in document:
                builder.add_item(FORMS[form](sequence, dtype))
            builder.end_document()
        else:
            tokens = [token for sequence in document for token in sequence]
            builder.add_document(FORMS[form](tokens, dtype), [len(sequence) for sequence in document])
    builder.finalize(f"{prefix}.idx")
    dataset = IndexedDataset(str(prefix))
    assert [tokens.tolist() for tokens in dataset[:]] == [sequence for document in documents for sequence in document]
    assert np.diff(dataset.document_indices).tolist() == [len(document) for document in documents]
    assert verify_content(str(prefix)).dtype == dtype


WIDE = {
    "list": lambda tokens: list(tokens),
    "tuple": lambda tokens: tuple(tokens),
    "list of NumPy numbers": lambda tokens: [np.int64(token) for token in tokens],
    "strings": lambda tokens: [str(token) for token in tokens],
    "array": lambda tokens: np.array(tokens, dtype=np.int64),
    "strided array": lambda tokens: np.repeat(np.array(tokens, dtype=np.int64), 2)[::2],
    "foreign byte order": lambda tokens: np.array(tokens, dtype=">i8"),
    "unaligned array": lambda tokens: np.frombuffer(
        b"\x00" + np.array(tokens, dtype=np.int64).tobytes(), dtype=np.int64, offset=1
    ),
    "tensor": lambda tokens: torch.tensor(tokens, dtype=torch.int64),
    "tensor with a stride": lambda tokens: torch.tensor(tokens, dtype=torch.int64).repeat_interleave(2)[::2],
}


@pytest.mark.parametrize("form", WIDE)
@pytest.mark.parametrize("dtype", [dtype for dtype in INTEGERS if dtype != "int64"])
def test_tokens_of_a_wider_type_are_stored_if_they_fit_and_refused_if_not(prefix, dtype, form):
    limits = np.iinfo(dtype)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(dtype).type)
    builder.add_item(WIDE[form]([limits.min, 0, limits.max]))
    for wrong in (limits.min - 1, limits.max + 1):
        with pytest.raises(ArgumentError, match=rf"out\.bin: .*{dtype}.* found {wrong}$"):
            builder.add_item(WIDE[form]([1, 2, wrong, 3]))
        with pytest.raises(ArgumentError, match=rf"out\.bin: .*{dtype}.* found {wrong}$"):
            builder.add_document(WIDE[form]([1, wrong]), [2])
    builder.add_item(WIDE[form]([7]))
    builder.end_document()
    builder.finalize(f"{prefix}.idx")
    # What was refused left no trace.
    assert [tokens.tolist() for tokens in IndexedDataset(str(prefix))[:]] == [[limits.min, 0, limits.max], [7]]
    assert verify(str(prefix)).tokens == 4


@pytest.mark.parametrize("dtype", CODES)
def test_nothing_is_taken_in_any_form(prefix, dtype):
    empty = ([], (), [[]], np.array([]), np.array([], dtype=np.int64), torch.tensor([]))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(dtype).type)
    for tokens in (*empty, np.zeros((2, 0))):
        builder.add_document(tokens, [0])
    builder.finalize(f"{prefix}.idx")
    assert [tokens.tolist() for tokens in IndexedDataset(str(prefix))[:]] == [[]] * 7


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(
    "tokens",
    [
        [2**70],
        [1, 2.0],
        [1.5],
        [None],
        ["x"],
        ["1.5"],
        ["1", "99999999999999999999"],
        [[1], [2, 3]],
        np.array([1.0]),
        np.array([True]),
        np.array([1j]),
        np.array([object()]),
        torch.tensor([1.0]),
        torch.tensor([True]),
        b"12",
    ],
)
def test_what_is_no_integer_is_refused(prefix, dtype, tokens):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.dtype(dtype).type)
    with pytest.raises(ArgumentError, match=r"out\.bin: tokens stored as .* must be integers"):
        builder.add_item(tokens)
    builder.discard()


@pytest.mark.parametrize("tokens", [2**24 + 1, -(2**24) - 1, 2**31 - 1])
def test_an_integer_that_a_float_would_round_is_refused(prefix, tokens):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.float32)
    builder.add_item([2**24, -(2**24), 0])
    for form in (list, np.array, torch.tensor):
        with pytest.raises(ArgumentError, match=f"float32 .* found {tokens}$"):
            builder.add_item(form([1, tokens]))
    builder.discard()


@pytest.mark.parametrize("dtype", CODES)
def test_numbers_in_words_are_taken(prefix, dtype):
    build(prefix, [["1", "22", "0"], []], np.dtype(dtype).type)
    assert [tokens.tolist() for tokens in IndexedDataset(str(prefix))[:]] == [[1, 22, 0], []]


def test_fractions_in_words_are_taken_where_fractions_are_stored(prefix):
    build(prefix, [["1.5", "-2e3"]], np.float64)
    assert IndexedDataset(str(prefix))[0].tolist() == [1.5, -2000.0]


@pytest.mark.parametrize("dtype", CODES)
def test_the_file_is_little_endian_whatever_type_is_asked_for(prefix, dtype):
    swapped = np.dtype(dtype).newbyteorder(">")
    for tokens in ([1, 2], np.array([1, 2], dtype=dtype), np.array([1, 2], dtype=swapped)):
        build(prefix, [tokens], swapped)
        assert Path(f"{prefix}.bin").read_bytes() == np.array([1, 2], dtype=np.dtype(dtype).newbyteorder("<")).tobytes()


@pytest.mark.parametrize("dtype", [np.uint32, np.bool_, np.float16, None])
def test_a_type_that_a_file_cannot_hold_is_refused(prefix, dtype):
    with pytest.raises(ArgumentError, match="dtype must be one of"):
        IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    assert files(prefix.parent) == []


def test_tokens_in_several_rows_are_counted_by_the_number(prefix):
    rows = np.arange(6).reshape(2, 3)
    for tokens in (rows, rows.tolist(), torch.from_numpy(rows)):
        builder = IndexedDatasetBuilder(f"{prefix}.bin")
        builder.add_item(tokens)
        builder.end_document()
        builder.add_document(tokens, [6])
        with pytest.raises(ArgumentError, match=r"lengths .* 6 tokens, found \[2\]"):
            builder.add_document(tokens, [2])
        builder.finalize(f"{prefix}.idx")
        assert verify(str(prefix)).tokens == 12
        assert IndexedDataset(str(prefix))[1].tolist() == [0, 1, 2, 3, 4, 5]


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
    assert builder.sequence_lengths == [2, 1] * 5
    assert builder.document_indices == [0, 2, 4, 6, 8, 10]
    assert IndexedDataset(str(prefix)).sequence_lengths.tolist() == [2, 1] * 5


@pytest.mark.parametrize("modes", [[128], [-129], [300], [2**70]])
def test_a_mode_that_is_no_byte_is_refused_at_once(prefix, modes):
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


def test_there_is_one_mode_a_sequence(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", multimodal=True)
    for modes in ([], [1], [1, 2, 3]):
        with pytest.raises(ArgumentError, match=f"as many as .*2 lengths, found {len(modes)}"):
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


def test_nothing_stands_under_the_final_name_before_the_end(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document(np.arange(100_000), [100_000])
    assert [name for name in files(prefix.parent) if not name.endswith(".partial")] == []
    builder.finalize(f"{prefix}.idx")
    assert files(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]


def test_an_older_pair_stays_until_it_is_replaced_whole(prefix):
    build(prefix, [[1, 2, 3]])
    held = IndexedDataset(str(prefix))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.add_document(np.arange(200_000) % 9, [200_000])
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))
    builder.finalize(f"{prefix}.idx")
    assert verify_content(str(prefix)).tokens == 200_000
    assert IndexedDataset(str(prefix))[0].dtype == np.uint16
    assert held[0].tolist() == [1, 2, 3]
    assert files(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]


def test_a_builder_that_gives_up_leaves_the_older_pair(prefix):
    build(prefix, [[1, 2, 3]])
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document(np.arange(200_000), [200_000])
    builder.discard()
    assert files(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))


def test_giving_up_comes_too_late_when_the_pair_is_there(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_document([1, 2], [2])
    builder.finalize(f"{prefix}.idx")
    builder.discard()
    assert files(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    assert verify_content(str(prefix)).tokens == 2


def test_two_builders_of_one_name_do_not_mix(prefix):
    first, second = (IndexedDatasetBuilder(f"{prefix}.bin") for _ in range(2))
    first.add_document([1] * 100_000, [100_000])
    second.add_document([2] * 100_000, [100_000])
    second.finalize(f"{prefix}.idx")
    first.finalize(f"{prefix}.idx")
    assert set(IndexedDataset(str(prefix))[0].tolist()) == {1}
    verify_content(str(prefix))


def test_a_pair_may_lie_in_two_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    builder = IndexedDatasetBuilder(str(tmp_path / "a" / "x.bin"))
    builder.add_document([1], [1])
    builder.finalize(str(tmp_path / "b" / "y.idx"))
    assert files(tmp_path / "a") == ["x.bin"]
    assert files(tmp_path / "b") == ["y.idx", "y.trackbed.json"]


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError):
        IndexedDatasetBuilder(str(tmp_path / "none" / "x.bin"))


# Dies at the n-th file that it opens, renames or removes while it replaces a pair.
DIE = """
import os, signal, sys
from trackbed.tokens import IndexedDatasetBuilder
prefix, last = sys.argv[1], int(sys.argv[2])
builder = IndexedDatasetBuilder(prefix + ".bin")
builder.add_document([4, 5, 6, 7], [4])
steps = 0
def step(event, arguments):
    global steps
    if event in ("open", "os.rename", "os.remove") and prefix in str(arguments[0]):
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(step)
builder.finalize(prefix + ".idx")
"""


def test_a_writer_killed_at_any_step_leaves_a_whole_pair_or_none(prefix):
    outcomes = []
    for step in range(1, 40):
        build(prefix, [[1, 2, 3]])
        died = subprocess.run([sys.executable, "-c", DIE, str(prefix), str(step)], check=False).returncode
        if IndexedDataset.exists(str(prefix)):
            verify_content(str(prefix))
            outcomes.append(IndexedDataset(str(prefix))[0].tolist())
        else:
            outcomes.append(None)
        if died == 0:
            break
        assert died == -signal.SIGKILL
    assert outcomes[0] == [1, 2, 3]
    assert outcomes[-1] == [4, 5, 6, 7]
    assert None in outcomes
    # The old pair, then none, then the new one; and the next writer has cleaned up after every killed one.
    assert [outcome for at, outcome in enumerate(outcomes) if outcomes[at - 1 : at] != [outcome]] == [
        [1, 2, 3],
        None,
        [4, 5, 6, 7],
    ]
    build(prefix, [[1]])
    assert files(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]


# Writes two pairs where files may have at most 300 KiB, and says what came of it.
FULL = """
import sys, resource, signal
import numpy as np
from trackbed.tokens import IndexedDatasetBuilder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, 300 << 10))
builder = IndexedDatasetBuilder(sys.argv[1] + ".bin", np.uint8)
try:
    builder.add_document(np.zeros(int(sys.argv[2]), np.uint8), [1] * int(sys.argv[2]))
    builder.finalize(sys.argv[1] + ".idx")
except OSError as error:
    builder.discard()
    print(error.strerror)
"""


@pytest.mark.parametrize("num_tokens", [400_000, 290_000])  # the .bin or only the .idx is too large
def test_a_full_disk_leaves_the_older_pair(prefix, num_tokens):
    build(prefix, [[1, 2, 3]])
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(prefix), str(num_tokens)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "File too large\n"
    assert files(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))


# Goes on after every failure where files may have at most 300 KiB, and says how often it failed.
STUBBORN = """
import sys, resource, signal
import numpy as np
from trackbed.tokens import IndexedDatasetBuilder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (300 << 10, 300 << 10))
builder = IndexedDatasetBuilder(sys.argv[1] + ".bin", np.uint8)
failures = 0
for _ in range(int(sys.argv[2])):
    try:
        builder.add_document(np.zeros(100_000, np.uint8), [100_000])
    except OSError:
        failures += 1
try:
    builder.finalize(sys.argv[1] + ".idx")
except OSError:
    print(failures)
builder.discard()
"""


# The failing write is the very last one, the last but one, or one of many.
@pytest.mark.parametrize("num_documents", [4, 8, 20])
def test_a_write_that_failed_is_never_forgotten(prefix, num_documents):
    build(prefix, [[1, 2, 3]])
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN, str(prefix), str(num_documents)], capture_output=True, text=True, check=True
    )
    assert (int(done.stdout) > 0) is (num_documents == 20)
    assert files(prefix.parent) == ["out.bin", "out.idx", "out.trackbed.json"]
    assert IndexedDataset(str(prefix))[0].tolist() == [1, 2, 3]
    verify_content(str(prefix))


def test_arrays_may_be_changed_as_soon_as_they_were_added(prefix):
    for dtype in (np.int32, np.int64, np.uint16):
        builder = IndexedDatasetBuilder(f"{prefix}.bin")
        tokens = np.empty(50_000, dtype=dtype)
        for number in range(10):
            tokens[:] = number
            builder.add_document(tokens, [len(tokens)])
            tokens[:] = 99
        builder.finalize(f"{prefix}.idx")
        assert [set(found.tolist()) for found in IndexedDataset(str(prefix))[:]] == [{number} for number in range(10)]


def test_a_process_may_fork_while_it_writes(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for number in range(4):
        builder.add_document(np.full(100_000, number), [100_000])
        assert run_in_fork(lambda: len(builder.sequence_lengths)) == number + 1
    builder.finalize(f"{prefix}.idx")
    assert verify_content(str(prefix)).tokens == 400_000


def test_builders_that_are_left_alone_hold_up_nothing(tmp_path):
    program = f"""if True:
        from trackbed.tokens import IndexedDatasetBuilder
        builder = IndexedDatasetBuilder({str(tmp_path / "x.bin")!r})
        builder.add_document([1] * 100_000, [100_000])
    """
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
    assert [name for name in files(tmp_path) if not name.endswith(".partial")] == []
    IndexedDatasetBuilder(str(tmp_path / "x.bin")).discard()
    assert files(tmp_path) == []


def test_another_pair_is_added_whole(prefix, pair):
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_item([1])
    builder.add_index(str(pair.prefix))  # continues the document that is open, as in Megatron Core
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
    with pytest.raises(ArgumentError, match=r"without modes .*out\.bin.*corpus\.idx"):
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
    assert files(tmp_path) == []


def test_a_pair_can_be_added_to_its_own_successor(prefix):
    build(prefix, [[1], [2]])
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    builder.add_index(str(prefix))
    builder.add_document([3], [1])
    builder.finalize(f"{prefix}.idx")
    assert [tokens.tolist() for tokens in IndexedDataset(str(prefix))[:]] == [[1], [2], [3]]


@pytest.mark.parametrize("name", ["text.document.v1.2", "with space", "näïve", "-x"])
def test_any_file_name_will_do(tmp_path, name):
    build(tmp_path / name, [[1, 2]])
    assert files(tmp_path) == sorted([f"{name}.bin", f"{name}.idx", f"{name}.trackbed.json"])
    verify_content(str(tmp_path / name))


def test_a_relative_path_will_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build(Path("x"), [[1, 2]])
    assert files(tmp_path) == ["x.bin", "x.idx", "x.trackbed.json"]
    assert verify_content("x").tokens == 2


def test_a_sequence_longer_than_the_format_can_say_is_refused(prefix):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint8)
    builder.sequence_lengths.append(2**31)
    with pytest.raises(ArgumentError, match=f"2\\*\\*31 tokens, found {2**31}"):
        builder.finalize(f"{prefix}.idx")
    builder.discard()
    assert files(prefix.parent) == []


def test_the_pair_of_this_test_is_not_what_the_builder_wrote(pair):
    # The other tests lean on pairs put together by hand; here both ways meet.
    by_hand = pair.idx.read_bytes(), pair.bin.read_bytes()
    builder = IndexedDatasetBuilder(str(pair.bin))
    builder.add_document([5, 6, 7], [3, 0])
    builder.add_document([-1, 9], [2])
    builder.finalize(str(pair.idx))
    assert (pair.idx.read_bytes(), pair.bin.read_bytes()) == by_hand
    assert isinstance(pair, Pair)
