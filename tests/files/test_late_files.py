"""Files that appear later than others of theirs."""

import threading
import time

from tests.support.files.built_pair import build
from trackbed.files import stamps_of_files
from trackbed.tokens import IndexedDataset


def test_a_pair_of_which_one_file_is_late_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("trackbed.files.late_files._SECONDS", 5.0)
    build(tmp_path / "a", [[1, 2, 3]])
    (tmp_path / "a.bin").rename(tmp_path / "hidden")
    timer = threading.Timer(0.3, (tmp_path / "hidden").rename, [tmp_path / "a.bin"])
    timer.start()
    started = time.monotonic()
    assert len(IndexedDataset(str(tmp_path / "a"))) == 1
    assert 0.2 < time.monotonic() - started < 4
    timer.join()


def test_files_of_which_none_is_there_are_not_waited_for(tmp_path):
    started = time.monotonic()
    assert stamps_of_files([tmp_path / "b.bin", tmp_path / "b.idx"]) == [None, None]
    assert time.monotonic() - started < 1


def test_what_stays_away_is_given_up_in_time(tmp_path):
    (tmp_path / "c.bin").touch()
    stamps = stamps_of_files([tmp_path / "c.bin", tmp_path / "c.idx"])
    assert [stamp is None for stamp in stamps] == [False, True]
