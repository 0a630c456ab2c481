"""A rank fails in a save or load by Megatron Core's wrappers, over any groups: all raise, and the next one works."""

from pathlib import Path

import pytest

from tests.support.processes.launching import run_script

RANK = Path(__file__).parent / "wrapper_faults_rank.py"
NUM_CASES = 3 * (6 + 6 + 2)
"""Each phase of a save and of a load, in each kind of groups."""


@pytest.mark.parametrize("kinds_for_each_phase", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_one_rank_raises_in_a_wrapper_is_raised_by_all(kinds_for_each_phase):
    of_ranks = run_script(RANK, 4, kinds_for_each_phase, limit_seconds=240)
    assert [len(cases) for cases in of_ranks] == [NUM_CASES * kinds_for_each_phase // 3] * 4
    for cases in of_ranks:
        for case in cases:
            assert "it broke" in (case["text"] or ""), case
            assert f"rank {case['who']}" in case["text"], case
            assert case["seconds"] < 2, case
            assert set(case["values"]) == {1.0}, case
            assert (case["last"], case["empty"], case["left"]) == (3.0, [0, 3], []), case
