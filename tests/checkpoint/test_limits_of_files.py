"""A limit of the size of files on one rank is named on all of them, also where the ranks meet through a file."""

from pathlib import Path

import pytest

from tests.support.processes.launching import run_script


@pytest.mark.parametrize("kind", ["file", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_limit_of_the_size_of_files_is_named_on_every_rank(kind, tmp_path):
    script = Path(__file__).parent / "limited_rank.py"
    results = run_script(script, 2, tmp_path, kind, limit_seconds=60)
    for ((text, names),) in results:
        assert "rank 1: OSError: [Errno 27] File too large (the limit of the size of files is 1,048,576 bytes)" in text
        assert not [name for name in names if name != "ranks"]
