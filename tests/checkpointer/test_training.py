"""A training that is killed while it saves goes on with the same batches and losses."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.files.built_pair import build
from tests.support.processes.launching import environments
from trackbed.checkpointer.steps import StepNames, steps_in

RANK = Path(__file__).parent / "trained_rank.py"


def train(folder, size, steps, losses, *kill):
    """Trains on some ranks. Returns their exit statuses."""
    command = [sys.executable, "-W", "ignore", str(RANK), str(folder), str(steps), str(losses), *map(str, kill)]
    errors = [(folder / f"{rank}.stderr").open("w+") for rank in range(size)]
    ranks = [
        subprocess.Popen(command, env={**place, "PYTHONPATH": str(ROOT)}, stderr=error)
        for place, error in zip(environments(size), errors, strict=True)
    ]
    try:
        statuses = [rank.wait(60) for rank in ranks]
    finally:
        for rank, error in zip(ranks, errors, strict=True):
            rank.kill()
            rank.wait()
            error.close()
    allowed = {0, 1, -signal.SIGKILL} if kill else {0}  # a rank may hear of the end of another one
    assert set(statuses) <= allowed, [Path(error.name).read_text()[-2000:] for error in errors]
    return statuses


def read(losses):
    """Loss and batch of each step, the last time that it was made; and the steps in order."""
    lines = [json.loads(line) for line in losses.read_text().splitlines() if line.endswith("]")]
    return {step: (float.fromhex(loss), batch) for step, loss, batch in lines}, [step for step, *_ in lines]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("size", "num_kills"),
    [pytest.param(2, 20, marks=pytest.mark.slow), pytest.param(1, 20, marks=pytest.mark.slow)],
)
def test_a_training_that_is_killed_has_the_batches_and_losses_of_one_that_is_not(size, num_kills, tmp_path):
    draw = random.Random(num_kills + size)
    for name in "ab":
        tokens = np.random.default_rng(ord(name)).integers(0, 64, (20, 300))
        build(tmp_path / name, tokens.tolist(), np.uint16)
    (tmp_path / "whole").mkdir()
    for name in ("a.bin", "a.idx", "b.bin", "b.idx"):
        (tmp_path / "whole" / name).symlink_to(tmp_path / name)
    steps = 9 * num_kills
    train(tmp_path / "whole", size, steps, tmp_path / "whole.json")
    expected, _ = read(tmp_path / "whole.json")
    assert len(expected) == steps
    losses = tmp_path / "losses.json"
    latest = 0
    for _ in range(num_kills):
        statuses = train(tmp_path, size, steps, losses, latest + draw.randint(2, 8), draw.random() * 0.05)
        assert -signal.SIGKILL in statuses
        latest = max(steps_in(tmp_path / "checkpoints", StepNames()), default=0)
    train(tmp_path, size, steps, losses)
    assert read(losses)[0] == expected
    if num_kills > 3:
        # On another number of ranks the batches are the same, and the losses nearly.
        other = tmp_path / "other.json"
        train(tmp_path / "whole", 3 - size, steps + 6, other)
        train(tmp_path, size, steps + 6, losses)
        (found, _), (whole, made) = read(losses), read(other)
        assert len(made) >= 6
        for step in made:
            assert found[step][1] == whole[step][1]
            assert found[step][0] == pytest.approx(whole[step][0], abs=1e-3)
