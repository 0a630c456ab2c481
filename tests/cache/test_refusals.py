"""Full disks, folders that cannot be written to, and files that went away: what is said, and what is left."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.files.small_entries import (
    STEM,
    arrays,
    collecting,
    entry,
    expected,
    files_in,
    open_,
    problems,
    seeds_in,
)
from trackbed.cache import build as building
from trackbed.cache.lookup import advice_on
from trackbed.errors import CacheError
from trackbed.files import publish

LARGE_ROWS = 2_000_000


def fill_large(allocate):
    """Arrays that are filled in their files."""
    made = {}
    for name, array in arrays(rows=LARGE_ROWS).items():
        made[name] = allocate(name, array.shape, array.dtype)
        made[name][:] = array
    return made


@pytest.mark.parametrize("size", ["4k", "16k", "100k", "10m", "20m"])
def test_a_full_disk_is_named_and_nothing_partial_stays(small_disk, size):
    disk = small_disk(size)
    with pytest.raises(CacheError, match=r"No space left on device; .*`trackbed cache gc` makes some") as raised:
        open_(disk, rows=LARGE_ROWS, build=fill_large)
    assert str(disk) in str(raised.value)
    assert files_in(disk) == {}


def test_a_disk_that_is_full_for_the_last_file_leaves_nothing_partial(small_disk):
    for pages in range(2, 12):
        disk = small_disk(f"{4 * pages}k")
        try:
            open_(disk)
        except CacheError:
            assert files_in(disk) == {}
        else:
            assert problems(disk) == []


def test_a_disk_that_is_full_does_not_keep_a_whole_cache_from_being_read(small_disk):
    disk = small_disk("1m")
    open_(disk)
    with pytest.raises(OSError, match="No space left"):
        (disk / "ballast").write_bytes(bytes(2 << 20))
    with collecting() as pending:
        assert seeds_in(open_(disk)) == {1}
    assert len(pending) == 1


def test_a_folder_that_not_even_root_may_write_to_serves_what_is_there_and_names_what_is_not(tmp_path, read_only):
    (tmp_path / "cache").mkdir()
    open_(tmp_path / "cache")
    before = files_in(tmp_path / "cache")
    view = read_only(tmp_path / "cache")
    with collecting():
        assert seeds_in(open_(view)) == {1}
    assert seeds_in(open_(view)) == {1}
    with pytest.raises(CacheError, match="Read-only file system; path_to_cache must name a folder that can be written"):
        open_(view, seed=2)
    assert files_in(tmp_path / "cache") == before


AS_NOBODY = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.support.files.small_entries import open_, seeds_in
if os.geteuid() == 0:  # whom no mode of a folder stops
    os.setgid(65534)
    os.setuid(65534)
assert seeds_in(open_(Path(sys.argv[1]))) == {1}
open_(Path(sys.argv[1]), seed=2)
"""


@pytest.fixture
def forbidden():
    """A folder with an entry, that its reader may not write to; a user other than root can reach it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
        for path in [Path(folder), *Path(folder).rglob("*")]:
            if path.is_dir():
                path.chmod(0o755)


def test_a_folder_that_a_user_may_not_write_to_serves_what_is_there_and_names_what_is_not(forbidden):
    open_(forbidden)
    for path in [forbidden, *forbidden.rglob("*")]:
        if path.is_dir():
            path.chmod(0o555)
    command = [sys.executable, "-c", AS_NOBODY, str(forbidden), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "CacheError" in done.stderr
    assert "Permission denied; path_to_cache must name a folder that you may read from and write to" in done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EIO])
def test_whatever_the_system_refuses_is_named_with_what_to_do(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(CacheError) as raised:
        open_(tmp_path, rows=LARGE_ROWS, build=fill_large)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path}/.trackbed/partial/{STEM}-document_index.npy")
    assert os.strerror(number) in message
    assert message.endswith(advice_on(OSError(number, "")))
    assert files_in(tmp_path) == {}


def test_a_file_that_is_removed_between_start_and_first_read_is_named_and_built_by_the_next_start(tmp_path):
    open_(tmp_path)
    found = open_(tmp_path)
    (tmp_path / f"{STEM}-sample_index.npy").unlink()
    with pytest.raises(CacheError, match=r"sample_index\.npy: the index cannot be read: .* start again"):
        found["sample_index"]
    assert seeds_in(open_(tmp_path)) == {1}


def test_a_file_that_is_overwritten_with_another_shape_is_named(tmp_path):
    open_(tmp_path)
    whole = (tmp_path / f"{STEM}-sample_index.npy").read_bytes()
    np.save(tmp_path / "other.npy", np.ones((2, 11), np.int32))
    assert len(whole) == (tmp_path / "other.npy").stat().st_size
    publish(tmp_path / "other.npy", tmp_path / f"{STEM}-sample_index.npy")
    with pytest.raises(CacheError, match=r"must hold int32 of shape \(11, 2\), found int32 of shape \(2, 11\); remove"):
        open_(tmp_path)["sample_index"]
    assert len(problems(tmp_path)) == 2


def test_what_is_filled_in_its_file_is_written_out_where_others_read_it_over_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "is_on_this_machine", lambda _folder: False)
    found = open_(tmp_path, rows=LARGE_ROWS, build=fill_large)
    assert seeds_in(found) == {1}
    assert problems(tmp_path) == []
    assert entry(tmp_path).arrays == tuple(expected())
