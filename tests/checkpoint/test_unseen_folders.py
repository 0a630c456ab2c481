"""A folder that some rank does not see is an error on all, even if that rank has nothing to write or to read."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.processes.launching import run_script

RANK = Path(__file__).parent / "unseen_folder_rank.py"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a file system needs root")
def test_a_folder_that_a_rank_does_not_see_is_an_error_on_all(tmp_path):
    (first, names), (second,) = run_script(RANK, 2, tmp_path, limit_seconds=60)
    assert first == second
    for text in first:
        assert "rank 1" in text
        assert "must be a folder on a file system that all ranks share, but this rank does not see it" in text
    assert names == ["plain"]
