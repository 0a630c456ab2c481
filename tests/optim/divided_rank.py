"""Gloo ranks that train a divided model, save it with its optimizer, and load it: `divided_rank.py FOLDER STEPS`.

The first launch saves, and writes the whole tensors and the losses that follow; each launch loads what is there, on any
number of ranks, under several meshes, and into a plain model.
"""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from trackbed import (
    DataParallelOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    load_sharded_state,
    save,
    sharded_state,
)
from trackbed.comm import SOLO
from trackbed.errors import CheckpointError

FOLDER = Path()  # set by `main`, as is the number of steps before the save
BEFORE, AFTER = 3, 3


class Net(nn.Module):
    """Tied weights, a frozen layer, a buffer, and sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(17, 6), nn.Linear(6, 7)
        self.norm, self.frozen = nn.LayerNorm(7), nn.Linear(7, 6)
        self.output = nn.Linear(6, 17, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(2))
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, tokens):
        self.calls += 1
        return self.output(self.frozen(self.norm(self.hidden(self.embedding(tokens)))))


class Odd(torch.optim.Optimizer):
    """Optimizer with a part of this rank, a tensor of another shape, a number and a text beside it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                local = [getattr(one, "_local_tensor", one) for one in (param, param.grad)]
                state = self.state[param]
                if not state:
                    state.update(
                        sum=torch.zeros_like(local[0], dtype=torch.float64), last=torch.zeros(3), count=0, kind="odd"
                    )
                state["sum"] += local[1]
                state["last"] += 1
                state["count"] += 1
                local[0].sub_(group["lr"] * local[1])


def new_model(seed):
    torch.manual_seed(seed)
    return Net()


def groups_of(model, *, turned=False):
    decayed = [param for param in model.parameters() if param.requires_grad and param.dim() > 1]
    others = [param for param in model.parameters() if param.requires_grad and param.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return groups[::-1] if turned else groups


KINDS = {
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "odd": lambda groups: Odd([{"params": group["params"]} for group in groups]),
}


def new(kind, mesh, seed, *, turned=False):
    model = new_model(seed)
    if mesh is not None and is_tensor_parallel(mesh):
        plan = {"hidden": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tensor"], plan)
        mesh = mesh["data"]
    if mesh is not None:
        for layer in (model.hidden, model.norm):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, KINDS[kind](groups_of(model, turned=turned))


def train(model, optimizer, schedule, steps):
    losses = []
    for step in steps:
        torch.manual_seed(step)
        tokens = torch.randint(17, (4, 5))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 + 0.1 * step)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def contents(model, optimizer, *, is_odd):
    """Whole tensors by name, and options of each parameter's group."""
    names = {param: name for name, param in model.named_parameters()}
    found = {name: whole(value.detach()) for name, value in model.state_dict().items()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            for field, value in optimizer.state.get(param, {}).items():
                if is_odd and field == "sum" and isinstance(param, DTensor):
                    placed = param.device_mesh, param.placements
                    value = DTensor.from_local(
                        value, *placed, shape=param.shape, stride=param.stride(), run_check=False
                    )
                found[f"{names[param]}/{field}"] = whole(value)
            found[f"{names[param]}/lr"] = group["lr"], group.get("weight_decay")
    return found


def check_same(found, expected, what):
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, (what, name)
            assert torch.equal(found[name], value), (what, name)
        else:
            assert found[name] == value, (what, name, found[name], value)


def start(kind, mesh):
    """Trains and saves, goes on, and writes what loads are compared with."""
    model, optimizer = new(kind, mesh, 1)
    num_states = len(optimizer.state)  # Adagrad has them from the beginning
    assert len(sharded_state(model, optimizer)["optimizer"]["state"]) == num_states
    assert len(optimizer.state) == num_states
    assert all(param.grad is None for param in model.parameters())
    schedule = schedule_of(optimizer)
    train(model, optimizer, schedule, range(BEFORE))
    average, _ = new(kind, mesh, 4)
    average.load_state_dict(model.state_dict())
    with torch.no_grad():
        model(torch.zeros((2, 3), dtype=torch.int64))  # an evaluation leaves whole parameters in the place of the parts
    state = sharded_state(model, optimizer)
    more = {**sharded_state(average, prefix="average."), "schedule": schedule.state_dict(), "step": BEFORE}
    with CommDebugMode() as sent:
        save({**state, **more}, FOLDER / kind)
    assert sent.get_total_counts() == 0, sent.get_comm_counts()
    if kind != "odd":  # of which torch refuses nothing, but stores the parts of one rank
        check_names(model, optimizer, state)
        for flattened in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flattened)
            theirs = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
            dcp.save(theirs, checkpoint_id=FOLDER / f"{kind} dcp {flattened}")
        titan = {**theirs["model"], "optimizer": theirs["optimizer"]}
        dcp.save(titan, checkpoint_id=FOLDER / f"{kind} titan")
    expected = copy.deepcopy(contents(model, optimizer, is_odd=kind == "odd"))
    losses = train(model, optimizer, schedule, range(BEFORE, BEFORE + AFTER))
    if dist.get_rank() == 0:
        torch.save([expected, losses, dist.get_world_size(), is_tensor_parallel(mesh)], FOLDER / f"{kind}.pt")
    dist.barrier()


def is_tensor_parallel(mesh):
    return mesh.mesh_dim_names == ("data", "tensor")


def check_names(model, optimizer, state):
    """The names and tensors are torch's."""
    theirs = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    assert theirs["model"].keys() == state["model"].keys()
    ours = state["optimizer"]["state"]
    assert theirs["optimizer"]["state"].keys() == ours.keys()
    for name, fields in theirs["optimizer"]["state"].items():
        assert all(torch.equal(whole(value), whole(ours[name][field])) for field, value in fields.items())


def check_loads(kind, mesh):
    expected, losses, num_ranks, has_tensors = torch.load(FOLDER / f"{kind}.pt", weights_only=True)
    is_odd, size = kind == "odd", dist.get_world_size()
    model, optimizer = new(kind, mesh, 2, turned=True)
    schedule = schedule_of(optimizer)
    if is_odd and size != num_ranks:
        with pytest.raises(CheckpointError, match=f"must be loaded on {num_ranks} ranks, as it was saved"):
            load_sharded_state(FOLDER / kind, model, optimizer)
        return
    found = load_sharded_state(FOLDER / kind, model, optimizer)
    assert found["step"] == BEFORE
    check_same(contents(model, optimizer, is_odd=is_odd), expected, (kind, "ours"))
    schedule.load_state_dict(found["schedule"])
    more = train(model, optimizer, schedule, range(BEFORE, BEFORE + AFTER))
    if num_ranks == size and is_tensor_parallel(mesh) == has_tensors:
        assert more == losses, (kind, more, losses)
    load_sharded_state(FOLDER / kind, model, prefix="average.")
    assert torch.equal(whole(model.hidden.weight.detach()), expected["hidden.weight"])
    if is_odd:
        return
    for theirs in ("dcp False", "dcp True", "titan"):
        model, optimizer = new(kind, mesh, 2)
        load_sharded_state(FOLDER / f"{kind} {theirs}", model, optimizer)
        check_same(contents(model, optimizer, is_odd=False), expected, (kind, theirs))
    model, optimizer = new(kind, mesh, 2)
    msd, osd = get_state_dict(model, optimizer)
    theirs = {"model": msd, "optimizer": {"state": osd["state"]}}
    dcp.load(theirs, checkpoint_id=FOLDER / kind)
    set_state_dict(model, optimizer, model_state_dict=theirs["model"], optim_state_dict={**osd, **theirs["optimizer"]})
    found = contents(model, optimizer, is_odd=False)
    check_same(
        {name: found[name] for name in expected if not name.endswith("/lr")},
        {name: expected[name] for name in expected if not name.endswith("/lr")},
        (kind, "dcp of ours"),
    )
    if dist.get_rank() == 0:
        model, optimizer = new(kind, None, 3)
        load_sharded_state(FOLDER / kind, model, optimizer, group=SOLO)
        check_same(contents(model, optimizer, is_odd=False), expected, (kind, "plain"))
    dist.barrier()


def check_own(mesh):
    """The state of a DataParallelOptimizer is loaded into a divided model, and the reverse."""

    def own(seed):
        model = new_model(seed)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=50)
        wrapper = DistributedDataParallel(model, config)
        return wrapper, DataParallelOptimizer(KINDS["AdamW fused"](groups_of(model)), wrapper)

    path = FOLDER / "own"
    if not path.exists():
        dist.barrier()
        wrapper, optimizer = own(1)
        train(wrapper, optimizer, schedule_of(optimizer.optimizer), range(BEFORE))
        with CommDebugMode() as sent:
            save(sharded_state(wrapper, optimizer), path)
        assert sent.get_total_counts() == 0, sent.get_comm_counts()
    else:
        wrapper, optimizer = own(2)
        load_sharded_state(path, wrapper, optimizer)
    states = optimizer.full_state_dict()["state"]
    model, torchs = new("AdamW fused", mesh, 3)
    load_sharded_state(path, model, torchs)
    names = dict(model.named_parameters())
    assert states
    for name, fields in states.items():
        assert all(torch.equal(whole(torchs.state[names[name]][field]), value) for field, value in fields.items())
    assert torch.equal(whole(model.embedding.weight.detach()), wrapper.module.embedding.weight)
    if dist.get_world_size() == torch.load(FOLDER / "AdamW fused.pt", weights_only=True)[2]:
        wrapper, optimizer = own(4)
        load_sharded_state(FOLDER / "AdamW fused", wrapper, optimizer)
        expected, *_ = torch.load(FOLDER / "AdamW fused.pt", weights_only=True)
        for name, fields in optimizer.full_state_dict()["state"].items():
            assert all(torch.equal(expected[f"{name}/{field}"], value) for field, value in fields.items())
    dist.barrier()


def check_replicas():
    """Adafactor, whose states have shapes of their own, of torch's replicas: torch's does not run on DTensors."""
    path = FOLDER / "Adafactor"

    def new_replica(seed):
        model = new_model(seed)
        return nn.parallel.DistributedDataParallel(model), torch.optim.Adafactor(groups_of(model), lr=0.1)

    if not path.exists():
        dist.barrier()
        wrapper, optimizer = new_replica(1)
        schedule = schedule_of(optimizer)
        train(wrapper, optimizer, schedule, range(BEFORE))
        save({**sharded_state(wrapper, optimizer), "schedule": schedule.state_dict()}, path)
        expected = copy.deepcopy(contents(wrapper.module, optimizer, is_odd=False))
        losses = train(wrapper, optimizer, schedule, range(BEFORE, BEFORE + AFTER))
        if dist.get_rank() == 0:
            torch.save([expected, losses, dist.get_world_size()], FOLDER / "Adafactor.pt")
        dist.barrier()
    expected, losses, num_ranks = torch.load(FOLDER / "Adafactor.pt", weights_only=True)
    assert any(name.endswith("/row_var") for name in expected)
    wrapper, optimizer = new_replica(2)
    schedule = schedule_of(optimizer)
    schedule.load_state_dict(load_sharded_state(path, wrapper, optimizer)["schedule"])
    check_same(contents(wrapper.module, optimizer, is_odd=False), expected, "Adafactor")
    more = train(wrapper, optimizer, schedule, range(BEFORE, BEFORE + AFTER))
    # The mean of several ranks' equal gradients is rounded.
    assert dist.get_world_size() != num_ranks or more == losses, (more, losses)


def main():
    global FOLDER, BEFORE
    FOLDER, BEFORE = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    meshes = [init_device_mesh("cpu", (size,))]
    meshes += [init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "parts"))] if size % 2 == 0 else []
    if size == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")))
    for kind in KINDS:
        if not (FOLDER / f"{kind}.pt").exists():
            dist.barrier()
            start(kind, meshes[0])
        for mesh in meshes:
            check_loads(kind, mesh)
    for mesh in meshes:
        check_own(mesh)
    check_replicas()
    FOLDER /= "tensor parallel"
    if is_tensor_parallel(meshes[-1]):
        FOLDER.mkdir(exist_ok=True)
        dist.barrier()
        start("AdamW foreach", meshes[-1])
    for mesh in meshes if FOLDER.exists() else ():
        check_loads("AdamW foreach", mesh)
    print(json.dumps(list(KINDS)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
