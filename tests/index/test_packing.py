"""Packs: exact best-fit decreasing, each piece once under each key, also in windows."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.tiers import slow_but
from trackbed.errors import ArgumentError, PlanError
from trackbed.index.packing import Packs
from trackbed.kernels.packing import PackShape, count_items, plan_packs
from trackbed.kernels.reference import best_fit_decreasing, pieces_of_document


@st.composite
def cases(draw):
    multiple = draw(st.sampled_from([1, 1, 2, 4, 7]))
    capacity = draw(st.integers(1, 40))
    length = multiple * capacity
    most = 3 * length if draw(st.booleans()) else length // 2 + 2
    lengths = draw(st.lists(st.integers(0, most), max_size=60))
    shape = PackShape(length, multiple, draw(st.sampled_from(["split", "cut", "drop"])))
    return np.array(lengths, dtype=np.int32), shape, draw(st.none() | st.integers(1, 5))


def items_of(lengths, shape):
    """Lengths of all items, in units."""
    pieces = [pieces_of_document(one, shape.sequence_length, shape.long_documents) for one in lengths.tolist()]
    return [-(-(stop - start) // shape.multiple) for part in pieces for start, stop in part]


def check(lengths, shape, most, window):
    packs = Packs(lengths, shape, most_documents=most, window=window)
    width = window or max(len(lengths), 1)
    parts = [lengths[start : start + width] for start in range(0, len(lengths), width)]
    wanted = [best_fit_decreasing(items_of(part, shape), shape.capacity, most) for part in parts]
    assert len(packs) == sum(map(len, wanted))
    whole = Counter(
        (document, *piece)
        for document, length in enumerate(lengths.tolist())
        for piece in pieces_of_document(length, shape.sequence_length, shape.long_documents)
    )
    for key in (0, 2**64 - 1):
        pieces, firsts = packs.find(np.arange(len(packs)), keys=np.full(len(packs), key, dtype=np.uint64))
        assert Counter(map(tuple, pieces.tolist())) == whole
        assert (np.diff(firsts) > 0).all()
        found = [part.tolist() for part in np.split(pieces, firsts[1:-1])] if len(packs) else []
        patterns = []
        for pack in found:
            units = [-(-(stop - start) // shape.multiple) for _, start, stop in pack]
            assert sum(units) <= shape.capacity
            assert units == sorted(units, reverse=True)
            assert len({document // width for document, *_ in pack}) == 1
            patterns.append(tuple(units))
        assert Counter(patterns) == Counter(tuple(sorted(pack, reverse=True)) for part in wanted for pack in part)


@example(case=(np.array([2, 3, 5, 14, 16, 16, 16], dtype=np.int32), PackShape(33), None), window=None)  # equal rooms
@given(case=cases(), window=st.none() | st.integers(1, 30))
def test_packs_are_those_of_best_fit_decreasing_and_hold_each_piece_once(case, window):
    check(*case, window)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(case=cases())
def test_packs_are_those_of_best_fit_decreasing_in_ten_thousand_cases(case):
    lengths, shape, most = case
    plan = plan_packs(count_items(lengths, shape), most)
    assert plan.num_packs == len(best_fit_decreasing(items_of(lengths, shape), shape.capacity, most))


@pytest.mark.parametrize("window", [None, 100_000])
@pytest.mark.parametrize("length", [4096, 32768])
def test_lognormal_lengths_fill_packs(length, window):
    lengths = np.maximum(1, np.random.default_rng(1).lognormal(np.log(500), 1.2, 200_000)).astype(np.int32)
    packs = Packs(lengths, PackShape(length), window=window)
    fill = np.maximum(lengths.astype(np.int64) - 1, 0).sum() / (len(packs) * length)
    assert fill >= 0.999
    pieces, _ = packs.find(np.arange(len(packs)), keys=np.full(len(packs), 7, dtype=np.uint64))
    documents, counts = np.unique(pieces[:, 0], return_counts=True)
    assert set(documents[counts > 1].tolist()) <= set(np.flatnonzero(lengths > length + 1).tolist())  # only these


def test_another_key_has_documents_meet_others():
    lengths = np.random.default_rng(2).integers(2, 400, 20_000).astype(np.int32)
    packs = Packs(lengths, PackShape(2048))
    met = []
    for key in (1, 2):
        pieces, firsts = packs.find(np.arange(len(packs)), keys=np.full(len(packs), key, dtype=np.uint64))
        parts = [part[:, 0].tolist() for part in np.split(pieces, firsts[1:-1])]
        met.append({(min(pair), max(pair)) for part in parts for pair in pairwise(part)})
    assert len(met[0] & met[1]) / len(met[0]) < 0.05  # 50 of a length


def test_packs_never_change():
    lengths = np.random.default_rng(3).integers(0, 300, 5_000).astype(np.int32)
    packs = Packs(lengths, PackShape(1024, 16), most_documents=9, window=2_000)
    pieces, firsts = packs.find(np.arange(len(packs)), keys=np.arange(len(packs), dtype=np.uint64))
    digest = int((pieces * np.arange(1, len(pieces) + 1)[:, None]).sum())
    assert (len(packs), len(pieces), int(firsts[77]), digest) == GOLDEN


GOLDEN = (837, 4961, 328, 41340227263)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"multiple": 3}, "multiple must divide 8, the sequence_length"),
        ({"multiple": 0}, "multiple must be a whole number of at least 1"),
        ({"long_documents": "trim"}, "long_documents must be one of split, cut, drop, found 'trim'"),
        ({"sequence_length": 2**31}, r"sequence_length must be below 2\*\*31"),
        ({"sequence_length": 0}, "sequence_length must be a whole number of at least 1"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(options, problem):
    with pytest.raises(ArgumentError, match=problem):
        PackShape(**{"sequence_length": 8, **options})


def test_arguments_out_of_range_are_refused():
    lengths = np.array([3, 4], dtype=np.int32)
    packs = Packs(lengths, PackShape(8))
    for number in (-1, 1):
        with pytest.raises(ArgumentError, match=r"packs must be in \[0, 1\)"):
            packs.find([number], keys=[0])
    for option in ("most_documents", "window"):
        with pytest.raises(ArgumentError, match=f"{option} must be a whole number of at least 1"):
            Packs(lengths, PackShape(8), **{option: 0})
    with pytest.raises(PlanError, match="document 1: a length must be at least 0, found -4"):
        Packs(-lengths[::-1].copy() + np.array([4, 0], dtype=np.int32) - np.array([0, 1], dtype=np.int32), PackShape(8))


@pytest.mark.parametrize("lengths", [[], [0], [1, 1, 0]])
def test_documents_without_a_label_make_no_pack(lengths):
    packs = Packs(np.array(lengths, dtype=np.int32), PackShape(8))
    assert len(packs) == 0
    pieces, firsts = packs.find([], keys=[])
    assert pieces.shape == (0, 3)
    assert firsts.tolist() == [0]


@pytest.mark.parametrize(("num_documents", "length"), slow_but([(10**6, 4096)], [(10**6, 4096), (10**7, 32768)]))
def test_plans_are_small(num_documents, length):
    lengths = np.maximum(1, np.random.default_rng(4).lognormal(np.log(500), 1.2, num_documents)).astype(np.int32)
    plan = plan_packs(count_items(lengths, PackShape(length)))
    assert plan.nodes.nbytes + plan.leaves.nbytes <= 16e6


@pytest.mark.parametrize("long_documents", ["split", "cut", "drop"])
@pytest.mark.parametrize("window", [None, 40])
def test_the_summary_counts_what_the_packs_hold(long_documents, window):
    lengths = np.random.default_rng(5).integers(0, 60, 200).astype(np.int32)
    packs = Packs(lengths, PackShape(32, multiple=2, long_documents=long_documents), window=window)
    found = packs.summary()
    pieces, _ = packs.find(range(len(packs)), keys=[1] * len(packs))
    placed = int((pieces[:, 2] - pieces[:, 1]).sum())
    assert (found.packs, found.places) == (len(packs), placed)
    assert found.lost_tokens == int(np.maximum(lengths - 1, 0).sum()) - placed
    assert (found.longer, found.empty) == (int((lengths > 33).sum()), int((lengths < 2).sum()))
