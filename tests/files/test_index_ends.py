import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.cancellation import polling
from trackbed.errors import ArgumentError
from trackbed.files import read_index_ends, read_stamps


def index(sequences, borders, *, more=0, first=0):
    """Bytes of an `.idx` with the given numbers of sequences and borders, all of whose numbers differ."""
    lengths = np.arange(first, first + sequences, dtype="<i4")
    pointers = np.arange(sequences, dtype="<i8") * -7
    counts = np.array([sequences, borders], dtype="<u8").tobytes()
    rest = [lengths, pointers, np.arange(borders, dtype="<i8") - 1_000, np.zeros(more, dtype=np.int8)]
    return b"MMIDIDX\0\0" + bytes(9) + counts + b"".join(array.tobytes() for array in rest)


def ends_of(path):
    """Head and tail of an `.idx` file, and its last length, pointer and document border; 0 for what is not there."""
    raw = Path(path).read_bytes()
    head, tail = raw[: 34 + 4096], raw[-4096:]
    if len(raw) < 34:
        return head, tail, [0, 0, 0]
    sequences, borders = (int.from_bytes(raw[at : at + 8], "little") for at in (18, 26))
    at = [34 + 4 * sequences, 34 + 12 * sequences, 34 + 12 * sequences + 8 * borders]
    is_there = [sequences > 0, sequences > 0, borders > 0]
    numbers = [
        int.from_bytes(raw[stop - size : stop], "little", signed=True) if there and at[-1] <= len(raw) else 0
        for stop, size, there in zip(at, (4, 8, 8), is_there, strict=True)
    ]
    return head, tail, numbers


def check(paths, **options):
    found = read_index_ends(paths, **options)
    stamps = read_stamps(paths).tolist()
    for path, raw, stamp in zip(paths, found, stamps, strict=True):
        head, tail, numbers = ends_of(path)
        assert (bytes(raw.head), bytes(raw.ends)) == (head, head + tail)
        assert [raw.last_length, raw.last_pointer, raw.last_border] == numbers
        assert list(raw.stamp) == stamp
        assert raw.changed_ns == Path(path).stat().st_ctime_ns


@pytest.mark.parametrize("num_threads", [1, 3])
def test_ends_equal_their_reference(tmp_path, num_threads):
    contents = [b"", bytes(33), bytes(34), index(0, 1), index(1, 2), index(3, 0), index(2**14, 2**14 + 1, more=2**14)]
    contents += [index(count, 2, more=count, first=-5) for count in (340, 341, 342, 343, 1015, 1016, 1023, 1024, 1025)]
    contents += [index(5, 6)[:-1], index(5, 6) + b"x", *(index(7, number) for number in range(500, 520))]
    paths = [f"{tmp_path}/{number}.idx" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        Path(path).write_bytes(content)
    check(paths, num_threads=num_threads)


@given(st.binary(max_size=60), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.booleans())
def test_any_bytes_are_read_and_none_beyond_the_file(tmp_path_factory, rest, sequences, borders, are_few):
    counts = [sequences % 9, borders % 9] if are_few else [sequences, borders]
    path = tmp_path_factory.getbasetemp() / "any.idx"
    path.write_bytes(bytes(18) + np.array(counts, dtype="<u8").tobytes() + rest)
    check([str(path)])


def test_a_file_that_cannot_be_read_is_an_error_and_the_others_are_read(tmp_path):
    (tmp_path / "a.idx").write_bytes(index(3, 4))
    (tmp_path / "folder").mkdir()
    paths = [f"{tmp_path}/{name}" for name in ("absent.idx", "a.idx", "folder", "a.idx/b.idx")]
    absent, one, folder, below = read_index_ends(paths)
    assert (type(absent), absent.filename) == (FileNotFoundError, paths[0])
    assert (folder.errno, below.errno) == (errno.EISDIR, errno.ENOTDIR)
    assert one.last_border == 3 - 1_000


def test_no_descriptor_stays_open(tmp_path):
    (tmp_path / "a.idx").write_bytes(index(3, 4))
    before = len(list(Path("/proc/self/fd").iterdir()))
    read_index_ends([f"{tmp_path}/a.idx", f"{tmp_path}/absent"] * 50, num_threads=4)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_of_no_files_nothing_is_read():
    assert read_index_ends([]) == []


def test_a_path_with_a_zero_byte_is_refused():
    with pytest.raises(ArgumentError, match="zero byte"):
        read_index_ends(["a\0b"])


def test_reading_can_be_ended(tmp_path):
    class EndedError(Exception):
        pass

    def end(_done):
        raise EndedError

    (tmp_path / "a.idx").write_bytes(index(1000, 1001))
    with polling(end), pytest.raises(EndedError):
        read_index_ends([f"{tmp_path}/a.idx"] * 100_000)
