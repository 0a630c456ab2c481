"""A rehearsal of the acceptance on a GPU, so that no time on one is lost to a typing error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ACCEPT = Path(__file__).with_name("accept.py")


# The section "one-rank" runs the other tests of this folder.
@pytest.mark.dist
@pytest.mark.parametrize(
    "only",
    [
        pytest.param(["--only", "steps,loader,checkpoints"], id="some"),
        pytest.param([], id="all", marks=pytest.mark.slow),
    ],
)
def test_everything_that_a_gpu_is_asked_runs_on_the_cpu(only, tmp_path):
    command = [sys.executable, str(ACCEPT), "--dry", *only, "--out", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-1000:]
    assert ", 0 failed, " in found.stdout.splitlines()[-1]
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert all(section["passed"] > 0 for name, section in sections.items() if name != "install")


def test_a_section_that_does_not_exist_is_refused(tmp_path):
    found = subprocess.run(
        [sys.executable, str(ACCEPT), "--only", "moon", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert "must name sections of install, one-rank" in found.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_machine_without_a_gpu_is_told_so_in_one_line(tmp_path):
    found = subprocess.run(
        [sys.executable, str(ACCEPT), "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert "must have torch for CUDA and a GPU: torch" in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
