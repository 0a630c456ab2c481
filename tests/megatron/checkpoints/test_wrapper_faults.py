"""A rank fails in a save or load by Megatron Core's wrappers, over any groups: all raise, and the next one works."""

from pathlib import Path

from tests.support.processes.launching import run_script

RANK = Path(__file__).parent / "wrapper_faults_rank.py"
NUM_CASES = 3 * (6 + 6 + 2)


def test_what_one_rank_raises_in_a_wrapper_is_raised_by_all():
    of_ranks = run_script(RANK, 4, limit_seconds=240)
    assert [len(cases) for cases in of_ranks] == [NUM_CASES] * 4
    for cases in of_ranks:
        for case in cases:
            assert "it broke" in (case["text"] or ""), case
            assert f"rank {case['who']}" in case["text"], case
            assert case["seconds"] < 2, case
            assert set(case["values"]) == {1.0}, case
            assert (case["last"], case["empty"], case["left"]) == (3.0, [0, 3], []), case
