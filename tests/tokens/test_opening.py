"""Tests of prefetching the metadata of many pairs before they are opened."""

import os
import sys
from pathlib import Path

import pytest

from blends import write_pair
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import IndexedDataset, IndexedGroup
from trackbed.tokens.opening import look_ahead, openings


class Opened:
    """Records the index files that are opened from now on; audit hooks cannot be removed."""

    def __init__(self):
        self.paths = []
        sys.addaudithook(self._record)

    def _record(self, event, arguments):
        if event == "open" and str(arguments[0]).endswith(".idx"):
            self.paths.append(arguments[0])


OPENED = Opened()


@pytest.fixture
def prefixes(tmp_path):
    for number in range(5):
        write_pair(tmp_path / str(number), [10 + number] * (3 + number), seed=number)
    return [f"{tmp_path}/{number}" for number in range(5)]


def test_prefetched_metadata_are_not_read_again_and_are_the_same(prefixes):
    with openings() as alone:
        one_by_one = [IndexedDataset(prefix, open_when_read=True) for prefix in prefixes]
    with openings() as noted:
        look_ahead(prefixes)
        OPENED.paths.clear()
        found = [IndexedDataset(prefix, open_when_read=True) for prefix in prefixes]
        assert OPENED.paths == []
    assert noted == alone
    for dataset, wanted in zip(found, one_by_one, strict=True):
        assert dataset.identity == wanted.identity
        assert [list(tokens) for tokens in dataset[:]] == [list(tokens) for tokens in wanted[:]]


def test_prefetched_metadata_are_used_once(prefixes):
    with openings():
        look_ahead(prefixes[:1])
        IndexedDataset(prefixes[0], open_when_read=True)
        write_pair(prefixes[0], [5] * 9, seed=1)
        assert len(IndexedDataset(prefixes[0], open_when_read=True)) == 9


def test_nothing_is_prefetched_without_a_context_or_for_known_pairs(prefixes):
    with openings() as noted:
        IndexedDataset(prefixes[0], open_when_read=True)
    known = {prefix: opening.to_json() for prefix, opening in noted.items()}
    OPENED.paths.clear()
    look_ahead(prefixes)
    with openings(known):
        look_ahead(prefixes[:1])
    assert OPENED.paths == []


def test_errors_of_a_pair_are_raised_when_it_is_opened(prefixes):
    index = Path(f"{prefixes[1]}.idx")
    index.write_bytes(b"x" + index.read_bytes()[1:])
    Path(f"{prefixes[2]}.bin").write_bytes(b"")
    with openings() as noted:
        look_ahead([*prefixes, f"{prefixes[0]}-absent"])
        with pytest.raises(FormatError, match="the magic must be"):
            IndexedDataset(prefixes[1], open_when_read=True)
        with pytest.raises(FormatError, match="the last sequence ends at byte"):
            IndexedDataset(prefixes[2], open_when_read=True)
        with pytest.raises(ArgumentError, match=r"missing .*-absent\.idx and .*-absent\.bin"):
            IndexedDataset(f"{prefixes[0]}-absent", open_when_read=True)
        with pytest.raises(FormatError, match="as in sequences_per_dataset"):
            IndexedDataset(prefixes[3], open_when_read=True, sequences_per_dataset=(1, 2))
    assert noted == {}


def test_the_pairs_of_a_group_are_prefetched(prefixes):
    with openings() as noted:
        group = IndexedGroup.open("all", prefixes)
    assert list(noted) == prefixes
    assert len(group) == sum(3 + number for number in range(5))


def test_a_file_that_is_replaced_before_it_is_read_is_an_error(prefixes):
    with openings():
        look_ahead(prefixes)
        dataset = IndexedDataset(prefixes[4], open_when_read=True)
    write_pair(prefixes[4], [5] * 9, seed=1)
    with pytest.raises(FormatError, match="must be the one that was opened"):
        _ = dataset[0]


def test_a_pipe_in_the_place_of_an_index_is_an_error_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.idx")
    (tmp_path / "pipe.bin").touch()
    with pytest.raises(FormatError, match=r"pipe\.idx: an index header has 34 bytes, this file has 0"):
        IndexedDataset(str(tmp_path / "pipe"))
    with openings():
        look_ahead([str(tmp_path / "pipe")])
