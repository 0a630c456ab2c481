"""The example that fine-tunes on conversations: fast enough, and after a kill with the same conversations a step."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT
from trackbed.ledger import read_run

PROGRAM = str(ROOT / "examples" / "finetune_chat.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def start(folder, num_ranks):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), PROGRAM, "--output", str(folder)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def finish(job):
    words, _ = job.communicate(timeout=150)
    assert job.returncode == 0, words
    return words


@pytest.mark.slow
@pytest.mark.dist
def test_two_ranks_learn_in_ninety_seconds_and_a_killed_run_goes_on_alone_with_the_same_conversations(tmp_path):
    begun = time.monotonic()
    finish(start(tmp_path / "whole", 2))
    assert time.monotonic() - begun < 90
    whole = read_run(tmp_path / "whole" / "run").steps
    assert whole[-1]["loss"] < 0.85 * whole[0]["loss"]
    shutil.copytree(tmp_path / "whole", tmp_path / "ended", ignore=shutil.ignore_patterns("run", "checkpoints"))
    job = start(tmp_path / "ended", 2)
    record = tmp_path / "ended" / "run" / "steps.jsonl"
    while not record.exists() or record.read_bytes().count(b"batch_hash") < len(whole) // 2 + 3:
        assert job.poll() is None
        time.sleep(0.05)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate(timeout=60)
    finish(start(tmp_path / "ended", 1))
    found = read_run(tmp_path / "ended" / "run").steps
    assert [line["batch_hash"] for line in found] == [line["batch_hash"] for line in whole]
    assert {line["num_ranks"] for line in found} == {1, 2}
    assert max(abs(one["loss"] - other["loss"]) for one, other in zip(found, whole, strict=True)) < 1e-3
