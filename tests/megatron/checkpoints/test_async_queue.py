"""Megatron Core's queue of asynchronous saves: they run behind training, and all ranks complete them together."""

from pathlib import Path

import pytest

from tests.support.processes.launching import run_script

RANK = Path(__file__).parent / "queue_rank.py"


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_requests_run_in_the_background_and_are_completed_by_all_ranks_together(size, tmp_path):
    ranks = [lines[0] for lines in run_script(RANK, size, tmp_path, limit_seconds=100)]
    for found in ranks:
        assert found["before"] == [[], 2, []]
        assert found["files before"] == []
        assert found["finalized"] == [0, 1]
        assert found["called"] == [1]
        assert found["values"] == [[0.0], [1.0]]
        assert found["same files"]
        assert found["error"] == "save: rank 1: OSError: the disk is gone"
        assert found["next"] == [3.0]
        assert found["left"] == ["0", "1", "3", "at once"]
    assert len({found["polls"] for found in ranks}) == 1
