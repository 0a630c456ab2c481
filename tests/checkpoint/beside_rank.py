"""One of two gloo ranks that save and load what lies beside DTensors: `beside_rank.py FOLDER`."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trackbed import load, open_checkpoint, save
from trackbed.errors import CheckpointError


def error_of(call):
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return None


def plain_tensors(folder, mesh):
    """Buffers and counts are stored as tensors, which torch reads, and filled."""
    rank = dist.get_rank()

    def state(first):
        return {
            "model": {
                "w": distribute_tensor(torch.arange(6.0) + first, mesh, [Shard(0)]),
                "mean": torch.ones(2) * first,
            },
            "steps": [torch.tensor(first)],
            "step": torch.tensor(first + rank),
            "epoch": int(first),
        }

    save(state(1.0), folder)
    stored = open_checkpoint(folder)
    assert sorted(stored) == ["model.mean", "model.w", "step"]
    request = state(0.0)
    loaded = load(request, folder)
    assert loaded["model"]["mean"] is request["model"]["mean"]
    assert torch.equal(request["model"]["mean"], torch.ones(2))
    assert (float(loaded["step"]), loaded["steps"], loaded["epoch"]) == (1.0, [torch.tensor(1.0)], 1)
    theirs = {"model": state(0.0)["model"], "step": torch.tensor(7.0)}
    dcp.load(theirs, checkpoint_id=folder)
    assert torch.equal(theirs["model"]["mean"], torch.ones(2))
    assert float(theirs["step"]) == 1.0
    whole = {"model": {"w": torch.zeros(6), "mean": torch.zeros(2)}}  # a model that is not divided
    load(whole, folder)
    assert torch.equal(whole["model"]["w"], torch.arange(6.0) + 1)


def one_rank_without(folder, mesh):
    """Plain tensors are stored alike on a rank that has no DTensor of its own."""
    other = DeviceMesh("cpu", [1])
    state = {"mean": torch.ones(3)}
    if dist.get_rank() == 1:
        state["w"] = DTensor.from_local(torch.ones(2), other, [Shard(0)], run_check=False)
        state["later"] = torch.ones(4)
    save(state, folder)
    assert sorted(open_checkpoint(folder)) == ["later", "mean", "w"]


def tied(folder, mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=mesh)
    save({"model": model.state_dict()}, folder)
    assert sum(file.stat().st_size for file in folder.glob("*.distcp")) < 1.3 * 512 * 64 * 4
    stored = open_checkpoint(folder)
    assert torch.equal(stored["model.0.weight"][:], stored["model.1.weight"][:])
    theirs = {"model": {"0.weight": torch.zeros(512, 64), "1.weight": torch.zeros(512, 64)}}
    dcp.load(theirs, checkpoint_id=folder)
    assert torch.equal(theirs["model"]["0.weight"], theirs["model"]["1.weight"])
    assert torch.equal(theirs["model"]["0.weight"], stored["model.0.weight"][:])
    before = model[0].weight.to_local().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    load({"model": model.state_dict()}, folder)
    assert torch.equal(model[0].weight.to_local(), before)


def two_meshes(folder, mesh):
    """A weight that two stages of a pipeline share is written once, if both have the same values."""
    rank = dist.get_rank()
    stages = [DeviceMesh("cpu", [stage]) for stage in range(2)]

    def state(value):
        weight = torch.full((256, 64), value)
        return {"embedding": DTensor.from_local(weight, stages[rank], [Shard(0)], run_check=False), f"only{rank}": 1}

    save(state(3.0), folder)
    assert torch.equal(open_checkpoint(folder)["embedding"][:], torch.full((256, 64), 3.0))
    assert sum(file.stat().st_size for file in folder.glob("*.distcp")) < 1.3 * 256 * 64 * 4
    text = error_of(lambda: save(state(3.0 + rank), folder))
    assert "embedding: the values on both meshes on which it lies must be the same" in text, text
    request = state(0.0)
    load(request, folder)
    assert torch.equal(request["embedding"].to_local(), torch.full((256, 64), 3.0))


def one_rank_lacks_it(folder, mesh):
    state = {"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])}
    text = error_of(lambda: save(state if dist.get_rank() == 0 else {}, folder))
    assert "w: each rank of the mesh of a DTensor must have it in its state, but rank 1 lacks it" in text, text
    save(state, folder)  # and the next save works


def objects(folder, mesh):
    """Objects with a state, at any depth, give and get it as torch calls them."""

    class Counter:
        def __init__(self):
            self.calls, self.value = [], 0

        def state_dict(self):
            self.calls.append("state_dict")
            return {"value": self.value}

        def load_state_dict(self, state):
            self.calls.append("load_state_dict")
            self.value = state["value"]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fully_shard(model, mesh=mesh)
    counter = Counter()
    counter.value = 3
    save({"app": {"model": model, "more": [counter]}, "step": 2}, folder)
    before = [param.to_local().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        model[1].running_mean.fill_(5)
    counter.value, counter.calls = 0, []
    loaded = load({"app": {"model": model, "more": [counter]}}, folder)
    assert (loaded["app"]["model"] is model, loaded["app"]["more"][0] is counter) == (True, True)
    assert (counter.value, counter.calls) == (3, ["state_dict", "load_state_dict"])
    assert float(model[1].running_mean.sum()) == 0
    assert all(torch.equal(param.to_local(), old) for param, old in zip(model.parameters(), before, strict=True))
    assert loaded["step"] == 2
    text = error_of(lambda: load({"app": {"other": counter}}, folder))
    assert "app.other, of Counter: its state must be in the checkpoint, but is not there" in text, text
    assert load({"app": {"other": counter}}, folder, strict="ignore")["step"] == 2


SCENARIOS = [plain_tensors, one_rank_without, tied, two_meshes, one_rank_lacks_it, objects]


def main():
    dist.init_process_group("gloo")
    mesh = DeviceMesh("cpu", torch.arange(2))
    for scenario in SCENARIOS:
        scenario(Path(sys.argv[1]) / scenario.__name__, mesh)
    print(json.dumps([scenario.__name__ for scenario in SCENARIOS]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
