"""A save or load inside a guarded training loop ends when another rank fails, though it has a group of its own."""

import time
from functools import partial

import pytest
import torch

import trackbed
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError, TrackbedError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig

TIMEOUT_SECONDS = 30


@pytest.mark.parametrize("call", ["save", "load", "latest_checkpoint"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_is_named_to_one_that_saves_or_loads(call, failing, tmp_path):
    trackbed.save({"step": 1}, tmp_path / "step-1")
    calls = {
        "save": lambda group: trackbed.save({"step": 2}, tmp_path / "step-2", group=group),
        "load": lambda group: trackbed.load(tmp_path / "step-1", group=group),
        "latest_checkpoint": lambda group: trackbed.latest_checkpoint(tmp_path, group=group),
    }

    def work(group):
        other = group.child("checkpoints")
        model = DistributedDataParallel(torch.nn.Linear(2, 2), DistributedDataParallelConfig(), process_group=group)
        began = time.monotonic()

        def fail():
            time.sleep(0.2)
            raise ValueError("boom")

        act = fail if group.rank == failing else partial(calls[call], other)
        with pytest.raises(CollectiveError, match=f"training: rank {failing}: ValueError: boom"), model.guarded():
            act()
        seconds = time.monotonic() - began
        # The group has lost its order: it is refused from now on.
        if group.rank != failing:
            with pytest.raises(TrackbedError, match="it gave up, because a training loop around it has failed"):
                calls[call](other)
        return seconds

    assert max(run_ranks(2, work, timeout_seconds=TIMEOUT_SECONDS)) < 5
    assert trackbed.latest_checkpoint(tmp_path) == tmp_path / "step-1"
