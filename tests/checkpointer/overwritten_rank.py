"""Gloo ranks that overwrite a state in place as soon as `save` returns: `overwritten_rank.py FOLDER COUNT [WORDS ...]`.

With "shares", the snapshot is the program's own memory, and the check must see that. With "deferred", parameters and
states of the optimizer are copied later, slowly, and changed by a step right behind the save; with "some", most of the
state does not fit into `max_bytes`. Writes the seeds whose checkpoint is not what it was when `save` was called.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from trackbed import Checkpointer, ShardedTensor, load, load_sharded_state, sharded_state
from trackbed.checkpoint.background.copies import LaterCopies
from trackbed.checkpoint.background.slab import Slab
from trackbed.errors import CheckpointError


class Net(nn.Module):
    """A tied weight, and a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.output = nn.Embedding(64, 48), nn.Linear(48, 64, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(300, 100))

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


class Schedule:
    """Object of a state with a state of its own."""

    def __init__(self):
        self.table = torch.zeros(20_000)
        self.count = [0]

    def state_dict(self):
        return {"table": self.table, "count": self.count}

    def load_state_dict(self, state):
        raise NotImplementedError


class Program:
    """Everything that a state may have, in memory that stays where it is."""

    def __init__(self, mesh):
        torch.manual_seed(1)
        self.mesh = mesh
        self.model = Net()
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        for param in self.model.parameters():
            param.grad = torch.ones_like(param)
        self.optimizer.step()
        self.memory = torch.zeros(200, 600)
        self.nested = [torch.zeros(30, 1000), {"deep": torch.zeros(7)}]
        self.values = {"list": [0, 1]}
        self.schedule = Schedule()

    def of_optimizer(self):
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        return [one.to_local() if isinstance(one, DTensor) else one for one in (*self.model.parameters(), *states)]

    def others(self):
        return [*self.model.buffers(), self.memory, self.nested[0], self.nested[1]["deep"], self.schedule.table]

    def tensors(self):
        return [*self.of_optimizer(), *self.others()]

    def make_step(self):
        """A forward and backward pass, and a step."""
        self.model(torch.arange(8)).sum().backward()
        self.optimizer.step()

    @torch.no_grad()
    def fill(self, seed, *, others_only=False):
        """The same values on all ranks, but for the memory of which each has a view."""
        for number, tensor in enumerate(self.others() if others_only else self.tensors()):
            torch.manual_seed(1000 * seed + number)
            tensor.copy_(torch.rand(tensor.shape) * 100)
        self.values["list"][:] = [seed, seed + 1]
        self.schedule.count[0] = seed

    def state(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        views = ShardedTensor.from_rank_offsets("views", self.memory[::2, 1::3].T, (0, rank, size))
        rows = DTensor.from_local(self.memory[1::2, :40], self.mesh, [Shard(0)], run_check=False)
        return {
            **sharded_state(self.model, self.optimizer),
            "views": views,
            "rows": rows,
            "nested": self.nested,
            "values": self.values,
            "schedule": self.schedule,
        }

    def contents(self):
        """All values, in new memory."""
        return [one.clone() for one in self.tensors()], json.loads(json.dumps(self.values)), self.schedule.count[0]


def read(path, program):
    """What a checkpoint has, in the memory of a program."""
    rest = load_sharded_state(path, program.model, program.optimizer)
    program.memory.zero_()
    rank, size = dist.get_rank(), dist.get_world_size()
    views = program.memory[::2, 1::3].T
    rows = DTensor.from_local(program.memory[1::2, :40], program.mesh, [Shard(0)], run_check=False)
    entry = ShardedTensor.from_rank_offsets("views", torch.zeros(views.shape), (0, rank, size))
    found = load({"views": entry, "rows": rows}, path, strict="ignore", allow_parts=True)
    views.copy_(found["views"])
    for mine, stored in zip(program.nested, rest["nested"], strict=True):
        if isinstance(mine, dict):
            mine["deep"].copy_(stored["deep"])
        else:
            mine.copy_(stored)
    program.values = rest["values"]
    program.schedule.table.copy_(rest["schedule"]["table"])
    program.schedule.count = rest["schedule"]["count"]


def main():
    folder, count, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    program, loaded = Program(mesh), Program(mesh)
    options = {"snapshot": "deferred"} if "deferred" in words else {}
    if "some" in words:
        options["max_bytes"] = 40_000
    if "deferred" in words:
        make = LaterCopies.make
        LaterCopies.make = lambda copies, poll: time.sleep(0.1) or make(copies, poll)
    if "shares" in words:
        if "deferred" in words:
            LaterCopies.wait = lambda _: None
        else:
            Slab.copies_of = lambda _, values, poll, later: list(values)
    torn = []
    with Checkpointer(folder, keep_last=2, **options) as checkpointer:
        program.make_step()
        program.fill(0)
        checkpointer.prepare(program.state())
        for seed in range(1, count + 1):
            program.fill(seed)
            expected = program.contents()
            checkpointer.save(seed, program.state())
            if "deferred" in words:
                program.fill(-seed, others_only=True)
                program.make_step()
                if any(map(torch.equal, program.of_optimizer(), expected[0])):
                    raise RuntimeError("a step must change all parameters and states")
            else:
                program.fill(-seed)
            try:
                checkpointer.wait()
            except CheckpointError as error:
                if "was before it was copied" not in str(error):
                    raise
                torn.append(seed)
                continue
            read(checkpointer.path(seed), loaded)
            found = loaded.contents()
            # Of the memory, the views alone are stored.
            mask = torch.zeros(200, 600)
            mask[::2, 1::3] = 1
            mask[1::2, :40] = 1
            for mine in (expected, found):
                place = next(number for number, one in enumerate(mine[0]) if one.shape == mask.shape)
                mine[0][place] = mine[0][place] * mask
            if found[1:] != expected[1:] or not all(map(torch.equal, found[0], expected[0])):
                torn.append(seed)
    print(json.dumps(torn))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # FSDP2 programs may crash at exit


if __name__ == "__main__":
    main()
