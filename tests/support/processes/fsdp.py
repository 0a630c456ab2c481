"""Two processes whose model is divided by FSDP2, and states of it that cannot be saved as plain values."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.support.processes.launching import run_script


def states():
    """States, by the words that the error must have."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    from trackbed.checkpoint import ShardedObject, ShardedTensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    weight = model.state_dict()["0.weight"]
    rank = dist.get_rank()
    piece = Shard.from_tensor_and_offsets(torch.full((2, 4), float(rank)), [2 * rank, 0], rank)
    sharded = init_from_local_shards([piece], [4, 4])
    replicated = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    uneven = {"w": torch.zeros(40_000 - 30_000 * rank)}
    return {
        "model.0.weight": {"model": model.state_dict(), "step": 1},
        "optimizer.state.0.exp_avg": {"optimizer": optimizer.state_dict()},
        "deep.0.0.x": {"deep": [({"x": weight},)]},
        "replicated": {"replicated": replicated},
        "sharded: .*ShardedTensor": {"sharded": sharded},
        "grid/shard_0_1": {"object": ShardedObject("grid", {"w": weight}, (1,), (0,), rank)},
        "tensor": {"t": ShardedTensor("tensor", weight, weight.dtype, (6, 8), (6, 8), (0, 0), (1, 1), rank)},
        "beside": {
            "model": {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=rank)},
            "beside": weight,
        },
        "local.w: .*rank 1": {"local": uneven},
    }  # fmt: skip


def main(folder):
    import re

    from trackbed import save
    from trackbed.errors import CheckpointError

    dist.init_process_group("gloo")
    outcomes = {}
    for words, state in states().items():
        try:
            save(state, Path(folder) / "checkpoint")
            outcomes[words] = "saved"
        except CheckpointError as error:
            outcomes[words] = bool(re.search(rf"rank [01].*{words}", str(error), re.DOTALL)) or str(error)
    print(json.dumps(outcomes))
    dist.destroy_process_group()


def run_fsdp(folder):
    """Outcomes of both ranks: True for each state that was refused with its key."""
    return [lines[0] for lines in run_script(Path(__file__), 2, folder, limit_seconds=100)]


if __name__ == "__main__":
    main(sys.argv[1])
