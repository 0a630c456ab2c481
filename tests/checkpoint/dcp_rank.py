"""One gloo rank of saves and loads through torch's functions and Trackbed's storage: `dcp_rank.py FOLDER`."""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import trackbed
from trackbed.checkpoint import dcp as dcp_module
from trackbed.checkpoint import find_damage
from trackbed.checkpoint.dcp import StorageReader, StorageWriter

FOLDER = Path()  # set by `main`


class Part:
    """Object with a state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "history": [1, {"x": 2.5}]}

    def load_state_dict(self, state):
        self.value = state["value"]


def new(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(3, 6) * seed).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer, value):
    theirs = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return {**theirs, "part": Part(value), "step": value, "plain": torch.full((3,), float(value))}


def full(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def whole(model, optimizer):
    found = {name: full(value) for name, value in model.state_dict().items()}
    for number, param in enumerate(model.parameters()):
        found |= {f"{number}.{key}": full(value) for key, value in optimizer.state[param].items()}
    return {name: value.clone() for name, value in found.items()}


def check_loaded(folder, expected, reader):
    model, optimizer = new(7)
    state = state_of(model, optimizer, 0)
    dcp.load(state, storage_reader=reader) if reader else dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = whole(model, optimizer)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (state["part"].value, state["step"], state["plain"].tolist()) == (3, 3, [3.0] * 3)


def check_trackbed(folder, expected):
    model, optimizer = new(8)
    found = trackbed.load_sharded_state(folder, model, optimizer)
    mine = whole(model, optimizer)
    assert all(torch.equal(mine[name], value) for name, value in expected.items())
    assert (found["step"], found["part"]["value"], found["part"]["history"]) == (3, 3, [1, {"x": 2.5}])
    assert trackbed.load(folder)["step"] == 3


def check_overwritten():
    """States are overwritten behind `async_save`, of which several are in flight; memory is used again afterwards."""
    groups, whole = [dist.new_group(backend="gloo") for _ in range(2)], torch.zeros(4000)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = DTensor.from_local(torch.zeros(300, 50), mesh, [Shard(0)], run_check=False)
    state = {"rows": rows, "tied": [whole, {"again": whole}], "view": whole[:1000:3], "values": {"step": 0}}
    futures = []
    for step in range(1, 5):
        rows.to_local().fill_(step)
        whole.fill_(step)
        state["values"]["step"] = step
        writer = StorageWriter(FOLDER / "overwritten" / str(step))
        futures.append(dcp.async_save(state, storage_writer=writer, process_group=groups[step % 2]))
        rows.to_local().fill_(-1)
        whole.fill_(-1)
        state["values"]["step"] = -1
        if step % 2 == 0:  # two at a time are made of what each had
            for future in futures:
                future.result()
            futures.clear()
            gc.collect()
    assert len(dcp_module._slabs._slabs) <= 2
    # DTensors alone: nothing but views refers to the copies.
    rows.to_local().fill_(7)
    writers = [StorageWriter(FOLDER / "overwritten" / f"rows{number}") for number in range(2)]
    first = dcp_module._slabs.copies_of([torch.zeros(3)])  # another slab is in use, too
    copies = writers[0].stage({"rows": rows})
    rows.to_local().fill_(8)
    others = writers[1].stage({"rows": rows})
    assert [float(one["rows"].to_local().min()) for one in (copies, others)] == [7, 8]
    del first, copies, others
    for step in range(1, 5):
        target = {**state, "values": {"step": 0}}
        dcp.load(target, storage_reader=StorageReader(FOLDER / "overwritten" / str(step)))
        found = {float(one) for tensor in (rows.to_local(), whole) for one in tensor.unique()}
        assert found == {step}, (step, found)
        assert target["values"]["step"] == step


def main():
    global FOLDER
    FOLDER = Path(sys.argv[1])
    dist.init_process_group("cpu:gloo")
    model, optimizer = new(1)
    expected = whole(model, optimizer)
    state = state_of(model, optimizer, 3)
    saves = {
        "save": lambda folder: dcp.save(state, storage_writer=StorageWriter(folder)),
        "cached": lambda folder: dcp.save(
            state, storage_writer=StorageWriter(folder), planner=DefaultSavePlanner(enable_plan_caching=True)
        ),
        "cached again": lambda folder: dcp.save(
            state, storage_writer=StorageWriter(folder), planner=DefaultSavePlanner(enable_plan_caching=True)
        ),
        "id": lambda folder: dcp.save(state, checkpoint_id=folder, storage_writer=StorageWriter()),
        "thread": lambda folder: dcp.async_save(
            state, storage_writer=StorageWriter(folder), process_group=dist.new_group(backend="gloo")
        ).result(),
        "process": lambda folder: dcp.async_save(
            state, storage_writer=StorageWriter(folder), async_checkpointer_type=AsyncCheckpointerType.PROCESS
        ).result(),
    }
    for name, save in saves.items():
        folder = FOLDER / name
        save(folder)
        dist.barrier()
        if dist.get_rank() == 0:
            assert not (found := list(find_damage(folder))), (name, found)
        check_loaded(folder, expected, StorageReader(folder))
        check_loaded(folder, expected, None)
        check_trackbed(folder, expected)
    check_overwritten()
    before = {path.name for path in FOLDER.iterdir()}
    fail_on_each_rank()
    gc.collect()  # what is left of a save goes with its writer
    dist.barrier()
    assert {path.name for path in FOLDER.iterdir()} == before
    trackbed.save({**trackbed.sharded_state(model, optimizer), "part": {"value": 3}, "step": 3}, FOLDER / "own")
    mine = {"model": model.state_dict(), "step": 0, "part": {"value": 0}}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    dcp.load(mine, storage_reader=StorageReader(FOLDER / "own"))
    assert all(torch.equal(full(value), expected[name]) for name, value in mine["model"].items())
    assert (mine["step"], mine["part"]["value"]) == (3, 3)
    print(json.dumps(sorted(before)))
    dist.destroy_process_group()


class Failing(DefaultSavePlanner):
    """Planner that fails on one rank, while data are written."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def resolve_data(self, write_item):
        if dist.get_rank() == self.rank:
            raise OSError(f"rank {self.rank} has no disk")
        return super().resolve_data(write_item)


def fail_on_each_rank():
    """All ranks raise torch's exception with the rank's error, and the earlier checkpoint stays."""
    state = {"w": torch.ones(3), **{f"of{rank}": torch.ones(2) * rank for rank in range(dist.get_world_size())}}
    state = {key: value for key, value in state.items() if key in ("w", f"of{dist.get_rank()}")}
    for rank in range(dist.get_world_size()):
        with pytest.raises(CheckpointException, match=f"rank {rank} has no disk") as caught:
            dcp.save(state, storage_writer=StorageWriter(FOLDER / "save"), planner=Failing(rank))
        assert list(caught.value.failures) == [rank]
        del caught
        # A planner that keeps its plans has the folder of the save that failed in them.
        keeps = DefaultSavePlanner(enable_plan_caching=True)
        writers = [StorageWriter(FOLDER / "save") for _ in range(2)]
        if dist.get_rank() == rank:
            writers[0].write_data = lambda *_: 1 / 0
        with pytest.raises(CheckpointException, match="division by zero"):
            dcp.save(state, storage_writer=writers[0], planner=keeps)
        dcp.save(state, storage_writer=writers[1], planner=keeps)
        # A state that a rank cannot copy is told to all at once.
        writer = StorageWriter(FOLDER / "save")
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == rank:
                patch.setattr(dcp_module, "staged", refuse)
            with pytest.raises(CheckpointException, match="no memory"):
                dcp.async_save(state, storage_writer=writer, process_group=dist.new_group(backend="gloo")).result()


def refuse(*_):
    raise TypeError("no memory")


if __name__ == "__main__":
    main()
