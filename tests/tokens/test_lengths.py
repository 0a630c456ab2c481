import numpy as np
import pytest

from tests.support.files.built_pair import build
from trackbed.tokens import IndexedDataset
from trackbed.tokens.read_headers import read_lengths

LENGTHS = [3, 0, 2, 5]


def index_of(prefix):
    build(prefix, [list(range(length)) for length in LENGTHS])
    return IndexedDataset(str(prefix), open_when_read=True).index


@pytest.mark.parametrize("is_mapped", [True, False])
def test_lengths_are_read_and_a_file_that_is_not_mapped_stays_so(tmp_path, is_mapped):
    indexes = [index_of(tmp_path / name) for name in "abc"]
    for index in indexes if is_mapped else []:
        index.map()
    found = read_lengths(indexes, [(0, 4), (1, 3), (2, 2)])
    assert [lengths.tolist() for lengths in found] == [[3, 0, 2, 5], [0, 2], []]
    assert {lengths.dtype for lengths in found} == {np.dtype(np.int32)}
    assert all(("_mapped" in vars(index)) == is_mapped for index in indexes)


def test_a_file_that_was_replaced_or_cut_is_not_read(tmp_path):
    replaced, whole, cut, gone = (index_of(tmp_path / name) for name in "abcd")
    build(tmp_path / "a", [[1, 2]])
    raw = (tmp_path / "c.idx").read_bytes()
    (tmp_path / "c.idx").write_bytes(raw[:40])
    (tmp_path / "d.idx").unlink()
    found = read_lengths([replaced, whole, cut, gone], [(0, 1), *[(0, 4)] * 3])
    assert [None if lengths is None else lengths.tolist() for lengths in found] == [None, [3, 0, 2, 5], None, None]


def test_of_no_files_nothing_is_read():
    assert read_lengths([], []) == []
