"""Memory that a load takes beyond its targets."""

import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes.launching import run_script
from trackbed.checkpoint import ShardedTensor, save

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_load_takes_64_mib_more_than_its_targets(tmp_path):
    state = {
        f"w{number}": ShardedTensor.from_rank_offsets(f"w{number}", torch.full((96 * MIB // 4 // 8, 8), number + 2.0))
        for number in range(3)
    }
    # All are wanted as float32.
    state["half"] = ShardedTensor.from_rank_offsets("half", torch.full((32 * MIB,), 0.5, dtype=torch.bfloat16))
    save(state, tmp_path / "checkpoint")
    ((found,),) = run_script(Path(__file__).with_name("load_memory.py"), 1, tmp_path / "checkpoint", limit_seconds=100)
    assert found["sums"] == {key: float(entry.data.sum(dtype=torch.float64)) for key, entry in state.items()}
    assert found["more"] < 64 * MIB
