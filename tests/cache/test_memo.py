import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.cache import read_memo, write_memo
from trackbed.files import stamp_of


def write_files(folder, count):
    for number in range(count):
        (folder / f"file{number}").write_bytes(bytes(number % 7))
    return {f"{folder}/file{number}": stamp_of(folder / f"file{number}") for number in range(count)}


def write(folder, stamps, content="what was found"):
    path = f"{folder}/.trackbed/starts/memo.json"
    (folder / ".trackbed").mkdir(exist_ok=True)
    rows = np.array([stamp or (-1, -1, -1) for stamp in stamps.values()], dtype=np.int64).reshape(-1, 3)
    write_memo(path, str(folder), list(stamps), rows, content)
    return path


def holds(path, folder):
    memo = read_memo(path, str(folder))
    return memo.holds(range(memo.num_chunks))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025])
def test_a_memo_holds_as_long_as_no_file_changes(tmp_path, count):
    path = write(tmp_path, write_files(tmp_path, count))
    memo = read_memo(path, str(tmp_path))
    assert memo.content == "what was found"
    assert memo.num_chunks == -(-count // 1024)
    assert holds(path, tmp_path)
    if count:
        (tmp_path / f"file{count - 1}").write_bytes(b"another")
        assert [memo.holds([chunk]) for chunk in range(memo.num_chunks)] == [True] * (memo.num_chunks - 1) + [False]


def grow(path):
    with path.open("ab") as file:
        file.write(b"a")


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(0, path.stat().st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize(
    "change", [grow, replace, os.unlink, lambda path: os.truncate(path, 0), lambda path: os.utime(path)]
)
def test_any_change_of_a_file_is_seen(tmp_path, change):
    stamps = write_files(tmp_path, 20)
    path = write(tmp_path, stamps)
    change(tmp_path / "file13")
    assert not holds(path, tmp_path)


def test_a_file_that_was_not_there_must_not_be_there(tmp_path):
    path = write(tmp_path, {**write_files(tmp_path, 3), f"{tmp_path}/absent": None})
    assert holds(path, tmp_path)
    (tmp_path / "absent").touch()
    assert not holds(path, tmp_path)


def test_files_may_lie_in_other_folders(tmp_path):
    (tmp_path / "cache").mkdir()
    path = write(tmp_path / "cache", write_files(tmp_path, 3))
    assert holds(path, tmp_path / "cache")
    (tmp_path / "file1").unlink()
    assert not holds(path, tmp_path / "cache")


@given(place=st.floats(0, 1), other=st.sampled_from([b"", b"\x00", b"9", b"\n"]))
def test_a_memo_that_is_cut_or_changed_anywhere_is_none(tmp_path, place, other):
    path = Path(write(tmp_path, write_files(tmp_path, 3), {"entries": [1, 2, 3]}))
    whole = path.read_bytes()
    at = int(place * (len(whole) - 2))
    changed = whole[:at] + (other + whole[at + 1 :] if other else b"")
    path.write_bytes(changed)
    memo = read_memo(str(path), str(tmp_path))
    assert memo is None or changed == whole


def test_a_folder_that_is_not_trackbeds_is_left_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_memo(f"{tmp_path}/.trackbed/starts/memo.json", str(tmp_path), [], np.empty((0, 3), np.int64), "found")
    assert not list(tmp_path.iterdir())


def test_there_may_be_no_memo(tmp_path):
    assert read_memo(f"{tmp_path}/absent.json", str(tmp_path)) is None
