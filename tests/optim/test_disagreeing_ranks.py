"""Ranks that disagree, or fail, in an update: none goes on with other parameters than the others without an error."""

from pathlib import Path

import pytest

from tests.support.processes.launching import run_script

SCRIPT = Path(__file__).with_name("disagreeing_rank.py")
RANKS = 4


@pytest.fixture(scope="module")
def found():
    """What each rank says of each case."""
    ranks = run_script(SCRIPT, RANKS, limit_seconds=150)
    return {
        (line["case"], line["collectives"]): [rank[number] for rank in ranks] for number, line in enumerate(ranks[0])
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "collectives", "words"),
    [
        ("other_experts", "auto", "rank 1"),
        ("other_experts", "torch", "rank 1"),
        ("two_models", "torch", "of another wrapper"),
        ("same_name", "auto", "the class of the optimizer must be the same on every rank"),
        ("rate_in_an_array", "auto", "lr=0.02"),
    ],
)
def test_all_ranks_raise_before_any_has_updated(case, collectives, words, found):
    outcomes = found[case, collectives]
    assert all(words in one["errors"][0] for one in outcomes), outcomes
    assert len({one["digest"] for one in outcomes}) == 1


@pytest.mark.dist
def test_no_step_follows_an_update_that_has_failed_on_one_rank(found):
    outcomes = found["failing_update", "torch"]
    first, *others = outcomes[1]["errors"]
    assert first == "MemoryError: no memory"
    assert len(others) == 1
    assert "a step has failed in the update of the parameters" in others[0]
    assert all(len(one["errors"]) == 1 for number, one in enumerate(outcomes) if number != 1), outcomes
