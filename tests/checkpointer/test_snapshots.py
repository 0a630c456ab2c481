"""What is saved is the state as it was when `save` was called, whatever the program does afterwards."""

from pathlib import Path

import pytest

from tests.support.processes.launching import run_script

RANK = Path(__file__).parent / "overwritten_rank.py"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("words", "count"),
    [
        ((), 4),
        (("some", "deferred"), 4),
        *(
            pytest.param(words, 200, marks=pytest.mark.slow)
            for words in ((), ("deferred",), ("some",), ("some", "deferred"))
        ),
    ],
)
def test_states_overwritten_in_place_are_saved_as_they_were(words, count, tmp_path):
    assert run_script(RANK, 2, tmp_path, count, *words, limit_seconds=30 + 2 * count) == [[[]], [[]]]


@pytest.mark.dist
@pytest.mark.parametrize("words", [(), pytest.param(("deferred",), marks=pytest.mark.slow)])
def test_the_check_sees_a_snapshot_that_shares_memory(words, tmp_path):
    assert run_script(RANK, 2, tmp_path, 3, "shares", *words, limit_seconds=60) == [[[1, 2, 3]], [[1, 2, 3]]]
