"""Shares wanted and consumed."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.pages import BLEND
from trackbed.blends.read import read_blend_content
from trackbed.report.blend_shares import Rows, batches_of, laid_out, pieces_of, rows_of, stages_of, wanted_of

TWO = Rows(("a", "b"), (0, 1), are_entries=True)


def read(text):
    return read_blend_content((BLEND + text).encode(), path=Path("1.toml"), folder=Path())


def wanted_by_hand(stages, start, stop):
    """Samples by row, from the shares in the middle of many small parts."""
    parts = 64
    places = start + (np.arange((stop - start) * parts) + 0.5) / parts
    total = np.zeros(2)
    for place in places:
        shares = np.zeros(2)
        for first, weights, ramp in stages:
            if place >= first:
                target = np.array(weights) / sum(weights)
                before = at_start.get(first, target)
                done = min(1.0, (place - first) / ramp) if ramp else 1.0
                shares = before + (target - before) * done
        total += shares / parts
    return total


at_start = {}


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4), st.integers(0, 40)), max_size=4),
    st.lists(st.integers(1, 9), min_size=1, max_size=20),
)
def test_the_share_wanted_is_the_integral_over_the_samples_of_the_steps(further, sizes):
    stages, first = [(0, [1, 1], 0)], 0
    for gap, weight, ramp in further:
        first += gap
        stages.append((first, [weight, 1], ramp))
    pieces = laid_out([(one, np.array(weights, dtype=np.float64), ramp) for one, weights, ramp in stages])
    at_start.clear()
    for one, _, ramp in stages:
        if ramp:  # from the shares at the end of the piece before
            at_start[one] = next(piece for piece in pieces if piece.stop_sample == one).shares_at(one)
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.float64)
    wanted = wanted_of(starts, np.array(sizes, dtype=np.float64), np.zeros(len(sizes), np.int64), [pieces])
    found = wanted.by(np.arange(len(sizes)), len(sizes), 2)
    for start, size, row in zip(starts, sizes, found, strict=True):
        np.testing.assert_allclose(row, wanted_by_hand(stages, int(start), int(start) + size), atol=1e-6)


def test_a_step_counts_for_the_stage_of_its_first_sample_and_a_stage_goes_on_in_the_next_job():
    stages = [(0, np.array([3.0, 1.0]), 0), (12, np.array([0.0, 1.0]), 0)]
    later = [*stages, (24, np.array([1.0, 0.0]), 8)]
    starts, steps = np.array([0.0, 8.0, 16.0, 24.0]), np.arange(1, 5)
    sizes, group = np.full(4, 8.0), np.array([0, 0, 1, 1])
    wanted = wanted_of(starts, sizes, group, [laid_out(stages), laid_out(later)])
    lines = [{"datasets": {"0": [60, 1.0], "1": [40, None]}}] * 3 + [{"datasets": {"1": [100, 2.0]}}]
    found, stage = stages_of(wanted, batches_of(lines), TWO, steps, sizes)
    assert stage.tolist() == [0, 0, 1, 2]
    assert [(one.first_sample, one.first_step, one.last_step, one.is_ramp) for one in found] == [
        (0, 1, 2, False),
        (12, 3, 3, False),
        (24, 4, 4, True),
    ]
    np.testing.assert_allclose(found[0].wanted, [12 * 0.75 / 16, 1 - 12 * 0.75 / 16])  # 4 samples are of the next
    np.testing.assert_allclose(found[2].wanted, [0.5, 0.5])
    np.testing.assert_allclose(found[0].consumed, [0.6, 0.4])
    assert found[2].tokens.tolist() == [0, 100]


def test_lines_without_known_shares_are_a_stage_of_their_own():
    starts = np.array([0.0, np.nan])
    wanted = wanted_of(starts, np.array([8.0, 8.0]), np.zeros(2, np.int64), [laid_out([(0, np.ones(2), 0)])])
    lines = [{"datasets": {"0": [8, 1.0]}}] * 2
    known, unknown = stages_of(wanted, batches_of(lines), TWO, np.arange(1, 3), np.array([8.0, 8.0]))[0]
    assert (known.first_sample, unknown.first_sample, unknown.wanted) == (0, None, None)


def test_rows_are_the_datasets_of_the_file_with_those_of_a_glob_together():
    glob = '[[dataset]]\nglob = "web-*"\nweight = 3\n[[dataset]]\npath = "code"\nweight = 1\n'
    file = read(glob)
    rows = rows_of(["d/web-1", "d/web-2", "d/code"], file, 3)
    assert (rows.names, rows.of_dataset) == (("web-*", "code"), (0, 0, 1))
    (piece,) = pieces_of({"stages": None}, file, rows)
    assert piece.before.tolist() == [0.75, 0.25]
    stages = [[0, [0.5, 0.25, 0.25], 0], [80, [0, 0, 1], 16]]
    assert [one.before.tolist() for one in pieces_of({"stages": stages}, None, rows)] == [
        [0.75, 0.25],
        [0.75, 0.25],
        [0.0, 1.0],
    ]
    two = read(glob + '[[dataset]]\nglob = "wiki-*"\nweight = 1\n')
    assert rows_of(["web-1", "code", "wiki-1", "wiki-2"], two, 4).of_dataset == (0, 1, 2, 2)
    assert not rows_of(["web-1", "other", "wiki-1", "wiki-2", "more"], two, 5).are_entries


@pytest.mark.parametrize(
    ("text", "prefixes"),
    [
        ('[[dataset]]\npath = "a"\nratio = 1\n[[dataset]]\npath = "b"\nratio = 2\n', ["a", "b"]),
        ('[[dataset]]\npath = "a"\n[[dataset]]\npath = "b"\n', ["a", "b"]),
        ('[[dataset]]\npath = "a"\nweight = 1\n', ["a", "b"]),
    ],
)
def test_shares_that_follow_from_sizes_of_data_or_another_file_are_not_known(text, prefixes):
    file = read(text)
    rows = rows_of(prefixes, file, 2)
    assert pieces_of({"stages": None}, file, rows) == []
    assert pieces_of({"stages": None}, None, rows) == []


@pytest.mark.parametrize(
    "stages",
    [
        [[8, [1, 1], 0], [0, [1, 1], 0]],
        [[2**60, [1, 1], 0]],
        "x",
        [],
        [[0]],
        [[0, [1, "a"], 0]],
        [[0, [0, 0], 0]],
        [[0, [1, 1, 1], 0]],
        [[0, [1, 1], -1]],
        [[None, [1], 0]],
    ],
)
def test_damaged_stages_give_no_shares(stages):
    assert pieces_of({"stages": stages}, None, TWO) == []


def test_datasets_of_one_name_are_told_apart_and_those_without_a_prefix_have_their_number():
    rows = rows_of(["x/text", "y/text"], None, 3)
    assert (rows.names, rows.of_dataset) == (("text (0)", "text (1)", "dataset 2"), (0, 1, 2))
