"""Wrappers called as Megatron Core 0.19 calls them, with the name of an asynchronous strategy."""

import json
import subprocess
import sys

from tests.support.processes.launching import without_gloo

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from trackbed.checkpoint import ShardedTensor
from trackbed.megatron import (
    FullyParallelLoadStrategyWrapper, FullyParallelSaveStrategyWrapper, TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from pathlib import Path
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
folder = Path(sys.argv[1]) / "checkpoint"
folder.mkdir()
state = lambda value: {"w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value))}
saver = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), None, True)
saver.async_save(state(2.0), folder, "mcore").execute_sync()
loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), None, True, "broadcast")
print(json.dumps([loader.load(state(0.0), folder, "mcore")["w"].tolist(), loader.stream_ckpt_dequant]))
dist.destroy_process_group()
"""


def test_wrappers_take_the_name_of_an_asynchronous_strategy(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    (line,) = without_gloo(found.stdout)
    assert json.loads(line) == [[2.0, 2.0, 2.0], False]
