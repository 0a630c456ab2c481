"""What is saved is the state as it was when `save` was called, whatever the program does afterwards."""

from pathlib import Path

import pytest

from tests.support.processes.launching import run_script

RANK = Path(__file__).parent / "overwritten_rank.py"


@pytest.mark.dist
@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_states_overwritten_in_place_are_saved_as_they_were(count, tmp_path):
    assert run_script(RANK, 2, tmp_path, count, limit_seconds=30 + 2 * count) == [[[]], [[]]]


@pytest.mark.dist
def test_the_check_sees_a_snapshot_that_shares_memory(tmp_path):
    assert run_script(RANK, 2, tmp_path, 3, "shares", limit_seconds=60) == [[[1, 2, 3]], [[1, 2, 3]]]
