from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexed_pair import Pair
from tiers import with_files
from trackbed.errors import ArgumentError, FormatError
from trackbed.tokens import pair_size, tokens_before


@pytest.fixture
def pair(tmp_path):
    return Pair(tmp_path / "pair", lengths=[3, 0, 2], borders=[0, 1, 3], tokens=[1, 2, 3, 4, 5], dtype="uint16").write()


@with_files
@given(st.lists(st.integers(0, 9), max_size=6), st.sampled_from(["uint8", "uint16", "int32", "int64"]))
def test_sizes_and_places_are_those_of_all_lengths(tmp_path, lengths, dtype):
    borders = [0, len(lengths)] if lengths else [0]
    pair = Pair(tmp_path / "pair", lengths=lengths, borders=borders, tokens=[0] * sum(lengths), dtype=dtype).write()
    size = pair_size(str(pair.prefix))
    assert (size.dtype, size.sequences, size.documents) == (np.dtype(dtype).type, len(lengths), len(borders) - 1)
    assert size.tokens == sum(lengths)
    places = range(len(lengths) + 1)
    assert tokens_before(str(pair.prefix), places) == [sum(lengths[:place]) for place in places]


def test_modes_do_not_matter(pair):
    replace(pair, modes=[0, 1, 0]).write()
    assert pair_size(str(pair.prefix)).tokens == 5


def test_damage_is_found_and_named(pair):
    pair.bin.write_bytes(b"1234567")
    with pytest.raises(FormatError, match=r"pair\.idx: sequence 2 must lie inside the \.bin of 7 bytes, found 10"):
        pair_size(str(pair.prefix))
    pair.write()
    pair.idx.write_bytes(pair.idx.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"pair\.idx: .* this file has 93"):
        pair_size(str(pair.prefix))
    pair.idx.write_bytes(b"nothing")
    with pytest.raises(FormatError, match="an index header has 34 bytes, this file has 7"):
        pair_size(str(pair.prefix))


def test_what_is_not_there_is_named(pair):
    with pytest.raises(ArgumentError, match=r"a sequence must be in \[0, 3\], found 4"):
        tokens_before(str(pair.prefix), [4])
    pair.bin.unlink()
    with pytest.raises(ArgumentError, match=r"pair: a \.bin and an \.idx file must exist, missing .*pair\.bin"):
        pair_size(str(pair.prefix))
