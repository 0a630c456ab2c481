"""Packs of consecutive documents: each place once, in the order of the file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.errors import ArgumentError, PlanError
from trackbed.index import contiguous_packs
from trackbed.index.contiguous_packs import ContiguousPacks
from trackbed.kernels.packing import PackShape


def one_by_one(lengths, length, multiple):
    """The pieces of each pack, place by place."""
    packs, room = [[]], length
    for document, tokens in enumerate(lengths):
        start = 0
        while start < tokens - 1:
            if not room:
                packs.append([])
                room = length
            count = min(tokens - 1 - start, room)
            packs[-1].append([document, start, start + count])
            room -= -(-count // multiple) * multiple
            start += count
    return packs if packs[0] else []


LENGTHS = st.lists(st.integers(0, 40), max_size=60)


@given(lengths=LENGTHS, shape=st.sampled_from([(8, 1), (8, 4), (12, 3), (5, 5), (1, 1)]), small=st.booleans())
def test_packs_are_those_of_a_loop_over_places(lengths, shape, small):
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(contiguous_packs, "_BLOCK", 2)
            patch.setattr(contiguous_packs, "_STEP", 4)
        length, multiple = shape
        packs = ContiguousPacks(np.array(lengths, dtype=np.int32), PackShape(length, multiple))
        wanted = one_by_one(lengths, length, multiple)
        assert len(packs) == len(wanted)
        pieces, firsts = packs.find(range(len(packs)), keys=[0] * len(packs))
        assert [part.tolist() for part in np.split(pieces, firsts[1:-1])] == (wanted or [[]])
        assert packs.most_pieces == max(map(len, wanted), default=0)
        padded = [[-(-(stop - start) // multiple) * multiple for _, start, stop in pack] for pack in wanted]
        costs = [sum(12 * 7 * one + one * one for one in pack) for pack in padded]
        assert packs.costs_of(0, hidden_size=7).costs.tolist() == costs
        for document in range(len(lengths)):
            holding = [number for number, pack in enumerate(wanted) if document in [piece[0] for piece in pack]]
            assert packs.holding(document, key=0).tolist() == holding
        found = packs.summary()
        assert found.places == sum(max(one - 1, 0) for one in lengths)
        assert (found.packs, found.empty) == (len(wanted), sum(one < 2 for one in lengths))


def test_what_is_out_of_range_is_refused():
    packs = ContiguousPacks(np.array([9, 9], dtype=np.int32), PackShape(8))
    with pytest.raises(ArgumentError, match=r"packs must be in \[0, 2\)"):
        packs.find([2], keys=[0])
    with pytest.raises(PlanError, match="document 1: a length must be at least 0, found -3"):
        ContiguousPacks(np.array([9, -3], dtype=np.int32), PackShape(8))
    with pytest.raises(ArgumentError, match="hidden_size must be at most"):
        packs.costs_of(0, hidden_size=1 << 21)
