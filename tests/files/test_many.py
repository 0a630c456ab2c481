"""Stamps and parts of many files, read in one call."""

import errno

import numpy as np
import pytest

from trackbed.cancellation import polling
from trackbed.errors import ArgumentError
from trackbed.files import join_names, read_parts, read_stamps, stamp_of

MISSING = (-1, -1, -1)


def stamps_of(paths):
    return [stamp_of(path) or MISSING for path in paths]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_stamps_are_those_of_each_file(tmp_path, count, num_threads):
    paths = [f"{tmp_path}/{number}" for number in range(count)]
    for number, path in enumerate(paths[::3]):
        (tmp_path / path).write_bytes(bytes(number))
    found = read_stamps(paths, num_threads=num_threads)
    assert found.tolist() == [list(stamp) for stamp in stamps_of(paths)]
    assert found.shape == (count, 3)
    assert (found[1::3] == -1).all()
    np.testing.assert_array_equal(read_stamps(paths, joined=join_names(paths)), found)


def test_names_may_lead_elsewhere_and_hold_any_byte(tmp_path, monkeypatch):
    odd = tmp_path / "a \n\udcff b"
    odd.write_bytes(b"abc")
    (tmp_path / "link").symlink_to(odd)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    names = [str(odd), odd.name, "link", "folder", "folder/../link", "broken/..", "link/below"]
    found = read_stamps(names)
    assert found.tolist() == [list(stamp) for stamp in stamps_of(names)]
    assert found[:3, 1].tolist() == [3, 3, 3]


def test_a_file_that_cannot_be_examined_is_told_from_one_that_is_missing(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    paths = [str(tmp_path / name) for name in ("missing", "loop", "n" * 300)]
    assert read_stamps(paths).tolist() == [[-1, -1, -1], [-1, -1, errno.ELOOP], [-1, -1, errno.ENAMETOOLONG]]


@pytest.mark.parametrize("names", [[""], ["a", ""], ["", "a"], ["a", "", "b"], ["a\0b"]])
def test_a_name_that_is_empty_or_has_a_zero_byte_is_refused(names):
    with pytest.raises(ArgumentError, match="must not be empty or have a zero byte"):
        read_stamps(names)


def test_reading_many_stamps_can_be_ended():
    class EndedError(Exception):
        pass

    def end(_done):
        raise EndedError

    with polling(end), pytest.raises(EndedError):
        read_stamps(["absent"] * 300_000)


def test_parts_of_files_are_read_one_after_the_other(tmp_path):
    paths = [f"{tmp_path}/{number}" for number in range(4)]
    for number, path in enumerate(paths[:3]):
        (tmp_path / path).write_bytes(bytes(range(number * 10, number * 10 + 10)))
    content, stamps = read_parts(paths, [2, 0, 8, 0], [3, 0, 3, 1])
    assert content[:3].tolist() == [2, 3, 4]
    np.testing.assert_array_equal(stamps[:2], read_stamps(paths[:2]))
    assert stamps[2:].tolist() == [[-1] * 3] * 2  # one ends before, one is not there
    assert len(content) == 7


@pytest.mark.parametrize(("starts", "sizes"), [([-1], [1]), ([0], [-1]), ([0, 0], [1, 1])])
def test_parts_that_cannot_be_are_refused(tmp_path, starts, sizes):
    with pytest.raises(ArgumentError, match="1 files must have starts and sizes of at least 0"):
        read_parts([f"{tmp_path}/x"], starts, sizes)


def test_reading_many_files_can_be_ended(tmp_path):
    class EndedError(Exception):
        pass

    def end(_done):
        raise EndedError

    with polling(end), pytest.raises(EndedError):
        read_parts([f"{tmp_path}/absent"] * 300_000, [0] * 300_000, [0] * 300_000)
