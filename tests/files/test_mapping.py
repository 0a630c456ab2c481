import ctypes
import gc
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes.forked import run_in_fork
from trackbed.files import drop_pages, expect_random_reads, map_readonly, read_ahead


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def is_mapped(path):
    return str(path) in Path("/proc/self/maps").read_text()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(256)) * 40)
    return path


def mapped(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return map_readonly(descriptor)
    finally:
        os.close(descriptor)


def test_a_map_keeps_no_descriptor(file):
    before = descriptors()
    array = mapped(file)
    assert descriptors() == before
    assert array.tobytes() == file.read_bytes()


def test_a_map_lives_as_long_as_any_view_of_it(file):
    array = mapped(file)
    view = array[5:9].view(np.uint16)
    del array
    gc.collect()
    assert view.tolist() == [5 + 6 * 256, 7 + 8 * 256]
    assert is_mapped(file)
    del view
    gc.collect()
    assert not is_mapped(file)


def test_a_map_cannot_be_written(file):
    array = mapped(file)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_an_empty_file_needs_no_map(tmp_path):
    (tmp_path / "empty").touch()
    assert mapped(tmp_path / "empty").shape == (0,)


def test_a_folder_cannot_be_mapped(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"Is a directory|No such device"):
            map_readonly(descriptor)
    finally:
        os.close(descriptor)


def test_a_forked_process_keeps_the_map(file):
    array = mapped(file)
    run_in_fork(lambda: array[7] == 7)
    assert array[7] == 7


def resident_kib():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile")]
    return int(line.split()[1])


def test_dropped_pages_leave_memory_and_are_read_again_on_access(tmp_path):
    content = np.arange(8 << 20, dtype=np.uint32).tobytes()
    (tmp_path / "large").write_bytes(content)
    array = mapped(tmp_path / "large")
    before = resident_kib()
    assert array.tobytes() == content
    assert resident_kib() - before > 24 << 10
    for start in range(0, len(array), 1_000_001):  # pieces that begin and end inside pages
        drop_pages(array[start : start + 1_000_001])
    assert resident_kib() - before < 4 << 10
    assert array.tobytes() == content


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_pieces_smaller_than_a_page_can_be_dropped(file, size):
    array = mapped(file)
    drop_pages(array[3 : 3 + size])
    assert array.tobytes() == file.read_bytes()


def pages_in_memory(array):
    """Returns the number of pages in memory of a mapped file that this process has not touched."""
    found = (ctypes.c_ubyte * -(-array.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes), found) == 0
    return sum(page & 1 for page in found)


def test_read_ahead_reads_pages_that_are_not_touched(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(4 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    array = mapped(path)
    if pages_in_memory(array):
        pytest.skip("this file system keeps its files in memory")
    read_ahead(array[1_000:3_000_000])
    deadline = time.monotonic() + 10
    while (found := pages_in_memory(array)) < 3_000_000 // mmap.PAGESIZE and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found >= 3_000_000 // mmap.PAGESIZE


def test_random_reads_read_the_pages_that_are_touched_alone(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(4 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    array = mapped(path)
    if pages_in_memory(array):
        pytest.skip("this file system keeps its files in memory")
    expect_random_reads(array)
    assert array[1_000_000] == array[3_000_000] == 0
    assert pages_in_memory(array) == 2


@pytest.mark.parametrize("size", [1, 5000])
def test_random_reads_may_be_expected_of_any_array(file, size):
    array = mapped(file)
    expect_random_reads(array)
    expect_random_reads(np.zeros(size, dtype=np.uint8))
    assert array.tobytes() == file.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_any_piece_can_be_read_ahead(file, size):
    array = mapped(file)
    read_ahead(array[3 : 3 + size])
    assert array.tobytes() == file.read_bytes()
