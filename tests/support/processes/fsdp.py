"""Two processes whose model is divided by FSDP2: a state that is loaded as it was, and states that are refused."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.support.processes.launching import run_script


def check_loaded(model, optimizer, mesh, path):
    """Saves the model, its optimizer, and a tensor that all ranks have, beside an entry, and loads them."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    from trackbed import ShardedTensor, load, save

    entry = ShardedTensor.from_rank_offsets("w", torch.ones(4), replica_id=dist.get_rank())
    copies = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "list": [copies],
        "more": {"w": entry},
        "step": 1,
    }
    save(state, path)
    tensors = [*model.parameters(), copies]
    tensors += [value for kept in optimizer.state.values() for value in kept.values() if value.ndim]
    before = [tensor.to_local().clone() for tensor in tensors]
    for tensor in tensors:
        tensor.to_local().detach().zero_()
    loaded = load(state | {"absent": copies}, path, strict="ignore")
    assert all(torch.equal(tensor.to_local(), old) for tensor, old in zip(tensors, before, strict=True))
    assert loaded["model"]["0.weight"] is state["model"]["0.weight"]
    assert loaded["list"][0] is copies
    assert (loaded["step"], "absent" in loaded) == (1, False)
    assert loaded["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert loaded["optimizer"]["state"][0]["step"] == 1
    optimizer.load_state_dict(loaded["optimizer"])


def states(folder):
    """States, by the words that the error must have."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.tensor import DTensor, Partial, init_device_mesh

    from trackbed.checkpoint import ShardedObject, ShardedTensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    check_loaded(model, optimizer, mesh, Path(folder) / "whole")
    weight = model.state_dict()["0.weight"]
    rank = dist.get_rank()
    piece = Shard.from_tensor_and_offsets(torch.full((2, 4), float(rank)), [2 * rank, 0], rank)
    sharded = init_from_local_shards([piece], [4, 4])
    uneven = {"w": torch.zeros(40_000 - 30_000 * rank)}
    return {
        "deep.0": {"deep": [({"x": weight},)]},
        "summed: .*Partial": {"summed": DTensor.from_local(torch.ones(4), mesh, [Partial()])},
        "sharded: .*ShardedTensor": {"sharded": sharded},
        "grid/shard_0_1": {"object": ShardedObject("grid", {"w": weight}, (1,), (0,), rank)},
        "tensor": {"t": ShardedTensor("tensor", weight, weight.dtype, (6, 8), (6, 8), (0, 0), (1, 1), rank)},
        "object.x": {"object": SimpleNamespace(x=weight)},
        "local.w: .*rank 1": {"local": uneven},
    }  # fmt: skip


def main(folder):
    import re

    from trackbed import save
    from trackbed.errors import CheckpointError

    dist.init_process_group("gloo")
    outcomes = {}
    for words, state in states(folder).items():
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
