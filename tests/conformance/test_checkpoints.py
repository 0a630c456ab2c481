"""Checkpoints under Megatron Core's module paths: saved and loaded by Trackbed and by Megatron Core."""

from pathlib import Path

import pytest

from launching import run_script

HERE = Path(__file__).parent
SHIM = str(HERE / "megatron_lm")
LIMIT_SECONDS = 300


def run(size, program, action, folder):
    script = HERE / "checkpoint_rank.py"
    found = run_script(script, size, program, action, folder, limit_seconds=LIMIT_SECONDS, PYTHONPATH=SHIM)
    assert found == [["ok"]] * size


@pytest.mark.dist
@pytest.mark.parametrize("size", [1, 2, 4])
def test_trackbed_loads_what_it_saves(tmp_path, size):
    run(size, "trackbed", "save", tmp_path)
    run(size, "trackbed", "load", tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize(("saver", "loader"), [("trackbed", "megatron"), ("megatron", "trackbed")])
def test_each_program_loads_what_the_other_saves(tmp_path, saver, loader):
    run(2, saver, "save", tmp_path)
    run(2, loader, "load", tmp_path)
