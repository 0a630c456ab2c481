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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from trackbed import load, load_sharded_state, open_checkpoint, save, sharded_state
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


def one_key_twice(folder, mesh):
    divided = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    for state in (
        {"w": divided, "a.b": torch.ones(2), "a": {"b": torch.zeros(2)}},
        {"w": divided, 0: torch.ones(2), "0": torch.zeros(3)},
        {"w.x": divided, "w": {"x": distribute_tensor(torch.ones(6), mesh, [Replicate()])}},
    ):
        text = error_of(lambda state=state: save(state, folder))
        assert "each tensor must have a path of its own in the state" in text, text
    assert not folder.exists()


class Versioned(nn.Linear):
    """Layer whose weights of the first version were half as large."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *others):
        if local_metadata.get("version") != 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


def versions(folder, mesh):
    """A module's migration runs for weights of an earlier version alone."""
    divided = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    plain, sharded = Versioned(4, 4), nn.Sequential(Versioned(4, 4))
    with torch.no_grad():
        plain.weight.fill_(1.0)
        sharded[0].weight.fill_(1.0)
    fully_shard(sharded, mesh=mesh)
    save({"w": divided, "plain": plain, "sharded": sharded}, folder / "new")
    save({"w": divided, "plain": dict(plain.state_dict())}, folder / "without")
    old = plain.state_dict()
    old._metadata[""] = {"version": 1}
    save({"w": divided, "plain": old}, folder / "old")
    for name, value in (("new", 1.0), ("without", 1.0), ("old", 2.0)):
        with torch.no_grad():
            plain.weight.fill_(7.0)
        load({"plain": plain}, folder / name)
        assert float(plain.weight.detach().mean()) == value, (name, plain.weight)
    load({"sharded": sharded}, folder / "new")
    assert float(sharded[0].weight.full_tensor().detach().mean()) == 1.0
    save(sharded_state(sharded), folder / "model")
    load_sharded_state(folder / "model", sharded)
    assert float(sharded[0].weight.full_tensor().detach().mean()) == 1.0


def tied_on_one_rank(folder, mesh):
    """A plain tensor that is another one on rank 1 alone keeps its own value."""
    rank = dist.get_rank()
    step = torch.tensor(float(rank))
    state = {"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]), "step": step}
    save(state | ({"best": step} if rank == 1 else {}), folder)
    stored = open_checkpoint(folder)
    assert [float(stored[key][...]) for key in ("step", "best")] == [0.0, 1.0]


def order_of_keys(folder, mesh):
    """All ranks find the keys in the same order, also where one has an empty part."""
    state = {
        "model": {
            name: distribute_tensor(torch.arange(float(size)), mesh, [Shard(0)])
            for name, size in (("c", 1), ("a", 4), ("b", 1))
        }
    }
    save(state, folder)
    loaded = load(state, folder)
    assert list(loaded["model"]) == ["c", "a", "b"]
    assert loaded["model"]["a"].full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]


def lists(folder, mesh):
    """DTensors in lists: with empty parts, of other meshes, and some of them not stored."""
    rank = dist.get_rank()
    stages = [DeviceMesh("cpu", [stage]) for stage in range(2)]
    own = DTensor.from_local(torch.full((2,), float(rank)), stages[rank], [Shard(0)], run_check=False)
    state = {
        "l": [distribute_tensor(torch.arange(float(size)), mesh, [Shard(0)]) for size in (4, 1)],
        "layers": [{"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)]), "b": torch.ones(2)} for _ in range(2)],
        "stages": [own],
    }
    save({**state, "stages": [own] if rank == 0 else []}, folder)
    found = load({**state, "stages": [own] if rank == 0 else []}, folder)
    assert found["l"][1] is state["l"][1]
    assert found["layers"][1]["w"] is state["layers"][1]["w"]
    more = distribute_tensor(torch.full((4,), -1.0), mesh, [Shard(0)])
    unstored = distribute_tensor(torch.full((9,), -1.0), mesh, [Shard(0)])
    found = load({"m": [unstored], "l": [more, state["l"][1], unstored]}, folder, strict="ignore")
    assert "m" not in found
    assert (found["l"][0] is more, found["l"][1] is state["l"][1], len(found["l"])) == (True, True, 2)
    assert more.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]


def kinds_that_differ(folder, mesh):
    """A plain value on rank 0 and a tensor on rank 1 would be stored in one place."""
    rank = dist.get_rank()
    divided = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    for other, words in (
        (5, "x: must be a tensor on all ranks that have it, but is a plain value of int on rank 0"),
        ({"y": 5}, "x: must be a tensor on all ranks that have it, but is a plain value of dict"),
    ):
        text = error_of(lambda other=other: save({"w": divided, "x": torch.ones(3) if rank else other}, folder))
        assert words in text, text


def large_tensors_of_later_ranks(folder, mesh):
    """A tensor that rank 0 lacks is stored by the first rank that has it."""
    rank = dist.get_rank()
    divided = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    save({"w": divided, **({"rope": torch.arange(20_000.0)} if rank else {})}, folder)
    assert open_checkpoint(folder)["rope"][19_999] == 19_999


def what_nobody_asks_for(folder, mesh):
    """Plain tensors come back unasked; what an object does not ask for is told."""

    class Lazy:
        mean = None

        def state_dict(self):
            return {} if self.mean is None else {"mean": self.mean, "count": 5}

        def load_state_dict(self, state):
            self.mean = state["mean"]

    lazy = Lazy()
    lazy.mean = torch.ones(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save({"model": model, "optimizer": optimizer, "lazy": lazy, "rng": torch.get_rng_state(), "none": None}, folder)
    fresh = Lazy()
    found = load({"lazy": fresh}, folder)
    assert torch.equal(fresh.mean, torch.ones(3))
    assert torch.equal(found["rng"], torch.get_rng_state())
    assert torch.equal(load(folder)["rng"], torch.get_rng_state())
    assert "rng" in load_sharded_state(folder, model)
    del optimizer.state[model[0].weight]
    text = error_of(lambda: load({"optimizer": optimizer}, folder))
    assert "optimizer.state.0.momentum_buffer: must be asked for by the object whose state it is" in text, text


def tensors_that_describe_themselves(folder, mesh):
    """`LocalShardsWrapper`, of which a rank has several boxes, as a DTensor's local part; and copies of one."""
    rank = dist.get_rank()

    def wrapped(value, copies):
        rows = [0, 1, 4] if copies or rank == 0 else [2, 3]
        boxes = [(0, 2), (4, 1)] if copies or rank == 0 else [(2, 2)]
        whole = torch.arange(10.0).view(5, 2) if value is None else torch.full((5, 2), value)
        shards = [whole[first : first + size].clone() for first, size in boxes]
        local = LocalShardsWrapper(shards, [(first, 0) for first, _ in boxes])
        assert sum(map(len, shards)) == len(rows)
        placed = [Replicate()] if copies else [Shard(0)]
        return DTensor.from_local(local, mesh, placed, run_check=False, shape=torch.Size([5, 2]), stride=(2, 1))

    save({"table": wrapped(None, copies=False), "step": torch.tensor(3)}, folder)
    assert open_checkpoint(folder)["table"][...].tolist() == torch.arange(10.0).view(5, 2).tolist()
    request = {"table": wrapped(-1.0, copies=False)}
    assert load(request, folder)["table"] is request["table"]
    expected = wrapped(None, copies=False)
    pairs = zip(request["table"]._local_tensor.local_shards(), expected._local_tensor.local_shards(), strict=True)
    assert all(torch.equal(found, value) for found, value in pairs)
    dcp_request = {"table": wrapped(-1.0, copies=False)}
    dcp.load(dcp_request, checkpoint_id=folder)
    assert torch.equal(dcp_request["table"]._local_tensor.local_shards()[0], expected._local_tensor.local_shards()[0])
    text = error_of(lambda: save({"table": wrapped(None, copies=True)}, folder))
    assert "table: main replicas must cover all elements, but no rank has [2:4, 0:2]" in text, text


SCENARIOS = [plain_tensors, one_rank_without, tied, two_meshes, one_rank_lacks_it, objects]
SCENARIOS += [one_key_twice, versions, tied_on_one_rank, order_of_keys, lists, kinds_that_differ]
SCENARIOS += [tensors_that_describe_themselves, large_tensors_of_later_ranks, what_nobody_asks_for]


def main():
    dist.init_process_group("gloo")
    mesh = DeviceMesh("cpu", torch.arange(2))
    for scenario in SCENARIOS:
        scenario(Path(sys.argv[1]) / scenario.__name__, mesh)
    print(json.dumps([scenario.__name__ for scenario in SCENARIOS]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
