"""One of four ranks that disagree in a step: `disagreeing_rank.py`. Writes what became of each case, as lines of JSON.

The program catches what is raised and goes on, as some do: then no rank may have other parameters than the others
without an error.
"""

import datetime as dt
import json
import os
import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trackbed import DataParallelOptimizer
from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig

SECONDS = 5


class AdamW(torch.optim.AdamW):
    """An optimizer of the same name as another one."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.expert = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.expert(self.dense(x))


def new(collectives, *, experts=False, kind=torch.optim.AdamW, group=None, **options):
    model = Model()
    arguments = {}
    if experts:
        for parameter in model.expert.parameters():
            parameter.allreduce = False
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        arguments["expert_process_group"] = pairs[dist.get_rank() // 2]
    config = DistributedDataParallelConfig(collectives=collectives)
    wrapper = DistributedDataParallel(None, config, model, process_group=group, **arguments)
    groups = [{"params": model.dense.parameters()}, {"params": model.expert.parameters()}]
    return wrapper, DataParallelOptimizer(kind(groups, lr=0.01, **options), wrapper)


def backward(wrapper, optimizer, step):
    optimizer.zero_grad()
    torch.manual_seed(step + 10 * dist.get_rank())
    wrapper(torch.randn(3, 4)).square().mean().backward()


def failing_update(collectives, group):
    """Rank 1 fails once in the update, after the ranks have agreed on it."""
    wrapper, optimizer = new(collectives, group=group)
    inner, failures = optimizer.optimizer.step, [MemoryError("no memory")] if dist.get_rank() == 1 else []

    def step(*arguments, **options):
        if failures:
            raise failures.pop()
        return inner(*arguments, **options)

    optimizer.optimizer.step = step
    return [wrapper], [optimizer]


def other_experts(collectives, group):
    """Rank 1 has another rate for its experts, which rank 0 has, too, and ranks 2 and 3 have not."""
    wrapper, optimizer = new(collectives, experts=True, group=group)
    if dist.get_rank() == 1:
        optimizer.param_groups[1]["lr"] = 0.02
    return [wrapper], [optimizer]


def two_models(collectives, group):
    """Rank 1 steps the optimizers of two models in the other order."""
    pairs = [new(collectives, group=group) for _ in range(2)]
    wrappers, optimizers = ([one[number] for one in pairs] for number in range(2))
    return wrappers, optimizers[::-1] if dist.get_rank() == 1 else optimizers


def same_name(collectives, group):
    """Rank 1 has an optimizer of another class, which has the same name."""
    wrapper, optimizer = new(collectives, kind=AdamW if dist.get_rank() == 1 else torch.optim.AdamW, group=group)
    return [wrapper], [optimizer]


def rate_in_an_array(collectives, group):
    """Rank 1 has another rate, in an array of NumPy."""
    wrapper, optimizer = new(collectives, group=group)
    optimizer.param_groups[0]["lr"] = np.array(0.02 if dist.get_rank() == 1 else 0.01)
    return [wrapper], [optimizer]


CASES = {one.__name__: one for one in (failing_update, other_experts, two_models, same_name, rate_in_an_array)}

WAYS = {"two_models": "torch", "failing_update": "torch"}
"""Collectives of a case, unless it is tried with both."""


def outcome(make, collectives):
    group = dist.new_group(timeout=dt.timedelta(seconds=SECONDS))
    wrappers, optimizers = make(collectives, group)
    errors = []
    for step in range(2):
        for optimizer in optimizers:
            try:
                backward(optimizer.model, optimizer, step)
                optimizer.step()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
    dense = [parameter.detach() for wrapper in wrappers for parameter in wrapper.module.dense.parameters()]
    digest = zlib.crc32(b"".join(parameter.numpy().tobytes() for parameter in dense))
    return {"errors": errors, "digest": digest}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))
    for name, make in CASES.items():
        for collectives in ("auto", "torch") if name == "other_experts" else (WAYS.get(name, "auto"),):
            print(json.dumps({"case": name, "collectives": collectives, **outcome(make, collectives)}), flush=True)
            dist.barrier()
    os._exit(0)  # operations that are left would end the process with an error


if __name__ == "__main__":
    main()
