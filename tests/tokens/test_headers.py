"""Headers of many pairs, read at once before the pairs are opened one by one."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.files.blends import write_pair
from trackbed.datasets.start import Start
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDataset, IndexedGroup
from trackbed.tokens.read_headers import read_headers


class Opened:
    """Counts the files that Python knows to be opened or looked at from here on; hooks of the interpreter stay."""

    def __init__(self):
        self.paths = []
        sys.addaudithook(self._note)

    def _note(self, event, arguments):
        if event == "open" and str(arguments[0]).endswith(".idx"):
            self.paths.append(arguments[0])


OPENED = Opened()


@pytest.fixture
def prefixes(tmp_path):
    for number in range(5):
        write_pair(tmp_path / str(number), [10 + number] * (3 + number), seed=number)
    return [f"{tmp_path}/{number}" for number in range(5)]


def open_pair(prefix, headers, **options):
    return IndexedDataset(prefix, open_when_read=True, header=headers.get(prefix), **options)


def test_a_header_that_was_read_ahead_is_not_read_again_and_is_the_same(prefixes):
    one_by_one = [IndexedDataset(prefix, open_when_read=True) for prefix in prefixes]
    headers = read_headers(prefixes)
    OPENED.paths.clear()
    found = [open_pair(prefix, headers) for prefix in prefixes]
    assert OPENED.paths == []
    for dataset, wanted in zip(found, one_by_one, strict=True):
        assert dataset.identity == wanted.identity
        assert dataset.index.ends == wanted.index.ends
        assert [list(tokens) for tokens in dataset[:]] == [list(tokens) for tokens in wanted[:]]


def test_a_start_gives_a_header_once(prefixes):
    start = Start()
    start.read_headers(prefixes[:1])
    assert start.header(prefixes[0]) is not None
    assert start.header(prefixes[0]) is None
    assert start.header(prefixes[1]) is None


def test_what_is_wrong_with_a_pair_is_said_when_it_is_opened(prefixes):
    index = Path(f"{prefixes[1]}.idx")
    index.write_bytes(b"x" + index.read_bytes()[1:])
    Path(f"{prefixes[2]}.bin").write_bytes(b"")
    headers = read_headers([*prefixes, f"{prefixes[0]}-absent"])
    assert list(headers) == [prefixes[0], *prefixes[2:]]
    with pytest.raises(FormatError, match="the magic must be"):
        open_pair(prefixes[1], headers)
    with pytest.raises(FormatError, match="the last sequence ends at byte"):
        open_pair(prefixes[2], headers)
    with pytest.raises(ArgumentError, match=r"missing .*-absent\.idx and .*-absent\.bin"):
        open_pair(f"{prefixes[0]}-absent", headers)
    with pytest.raises(FormatError, match="as in sequences_per_dataset"):
        open_pair(prefixes[3], headers, sequences_per_dataset=(1, 2))


def test_the_headers_of_a_group_are_read_at_once(prefixes):
    OPENED.paths.clear()
    group = IndexedGroup.open("all", prefixes)
    assert len(OPENED.paths) == len(prefixes)
    assert len(group) == sum(3 + number for number in range(5))


def test_a_file_that_is_replaced_before_it_is_read_is_an_error(prefixes):
    dataset = open_pair(prefixes[4], read_headers(prefixes))
    write_pair(prefixes[4], [5] * 9, seed=1)
    with pytest.raises(FormatError, match="must be the one that was opened"):
        _ = dataset[0]


def test_a_pipe_in_the_place_of_an_index_is_an_error_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.idx")
    (tmp_path / "pipe.bin").touch()
    with pytest.raises(FormatError, match=r"pipe\.idx: an index header has 34 bytes, this file has 0"):
        IndexedDataset(str(tmp_path / "pipe"))
    assert read_headers([str(tmp_path / "pipe")]) == {}
