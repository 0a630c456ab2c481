"""Loops written for torch's `DistributedDataParallel`, run on it and on Trackbed's: one of two processes.

Prints, for each loop, the parameters and gradients that differ in any bit at its end.
"""

import contextlib
import copy
import dataclasses
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

from trackbed import DistributedDataParallel, DistributedDataParallelConfig

STEPS = 4


class Net(nn.Module):
    """Tied, frozen and norm layers, and a layer that may be left out."""

    def __init__(self, ways):
        super().__init__()
        self.ways = ways
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.extra, self.frozen, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 6)
        self.tied = nn.Linear(6, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def run(self, part, x):
        return checkpoint(part, x, use_reentrant=self.ways["reentrant"]) if "reentrant" in self.ways else part(x)

    def forward(self, x):
        y = self.run(lambda z: self.norm(self.first(z)).tanh(), x)
        y = self.run(self.second, y) + self.tied(x)
        if self.ways.get("extra", True):
            y = self.run(self.extra, y)
        out = self.head(self.frozen(y).tanh())
        kind = self.ways.get("output", "tensor")
        if kind == "dict":
            return {"a": [out], "b": None}
        return Output(out, 3) if kind == "dataclass" else out


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    count: int


def value_of(out):
    if isinstance(out, dict):
        return out["a"][0]
    return out.value if isinstance(out, Output) else out


def batch(step, micro=0):
    seed = 1000 * step + 10 * micro + dist.get_rank()
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def loss_of(model, step, micro=0):
    return value_of(model(batch(step, micro))).square().mean()


def adamw(model, **more):
    return torch.optim.AdamW(model.parameters(), lr=0.01, **more)


LOOPS = {}


def loop(**options):
    """Adds a loop. Options: how the model runs, its type, and True if parameters may be unused."""

    def add(function):
        LOOPS[function.__name__] = (function, options)
        return function

    return add


def train(model, optimizer, *, set_to_none=True, clip=True):
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, step).backward()
        if clip:
            clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


@loop()
def clipped_and_stepped(model):
    train(model, adamw(model))


@loop()
def zeros_in_place(model):
    train(model, adamw(model), set_to_none=False)


@loop()
def other_optimizers(model):
    train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), set_to_none=False)
    train(model, torch.optim.Adam(model.parameters(), 0.01, fused=True))
    train(model, torch.optim.Adagrad(model.parameters(), 0.01))
    train(model, torch.optim.RMSprop(model.parameters(), 0.01, foreach=True))


@loop()
def gradients_that_are_never_zeroed(model):
    optimizer = adamw(model)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()


@loop()
def zeroed_by_the_model(model):
    optimizer = adamw(model)
    for step in range(STEPS):
        model.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, step).backward()
        optimizer.step()
        model.module.zero_grad()


@loop()
def micro_batches_in_no_sync(model):
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            with model.no_sync() if micro < 2 else contextlib.nullcontext():
                loss_of(model, step, micro).backward()
        optimizer.step()


@loop()
def micro_batches_that_are_all_reduced(model):
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        for micro in range(3):
            loss_of(model, step, micro).backward()
        optimizer.step()


@loop(ways={"extra": False}, unused=True)
def a_layer_that_is_never_used(model):
    train(model, adamw(model, weight_decay=0.1))
    assert model.module.extra.weight.grad is None


@loop(ways={}, unused=True)
def a_layer_that_one_rank_uses(model):
    optimizer = adamw(model, weight_decay=0.1)
    for step in range(STEPS):
        model.module.ways = {"extra": (step + dist.get_rank()) % 2 == 0}
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@loop(ways={}, unused=True)
def two_optimizers_of_two_halves(model):
    inner = model.module
    one = torch.optim.AdamW([*inner.first.parameters(), *inner.second.parameters()], 0.01)
    two = torch.optim.AdamW([*inner.extra.parameters(), *inner.head.parameters(), *inner.norm.parameters()], 0.01)
    for step in range(STEPS):
        inner.ways = {"extra": step % 2 == 0}
        loss_of(model, step).backward()
        one.step()
        one.zero_grad()
        loss_of(model, step, 1).backward()
        two.step()
        two.zero_grad(set_to_none=False)


@loop()
def scaled_losses(model):
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


@loop(ways={"reentrant": False})
def activation_checkpoints(model):
    train(model, adamw(model))


@loop(ways={"reentrant": False, "output": "dict"})
def activation_checkpoints_of_a_dictionary(model):
    train(model, adamw(model))


@loop()
def gradients_that_are_assigned(model):
    optimizer = adamw(model)
    for step in range(STEPS):
        for number, param in enumerate(model.parameters()):
            if param.requires_grad and number % 2:
                param.grad = torch.full_like(param, 0.25 + dist.get_rank())
        loss_of(model, step).backward()
        for param in model.parameters():
            if param.grad is not None and param.dim() == 1:
                param.grad = param.grad * 0.5
        clip_grad_value_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()


@loop()
def a_step_with_a_closure(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.detach()

    for _ in range(2):
        optimizer.step(closure)


@loop()
def gradients_of_the_inputs_alone(model):
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step)
        (found,) = torch.autograd.grad(model(x).sum(), x)
        assert all(param.grad is None for param in model.parameters())
        (loss_of(model, step) + found.mean()).backward()
        optimizer.step()


@loop(ways={"output": "dataclass"})
def a_data_class_is_returned(model):
    train(model, adamw(model))


@loop(unused=True)
def a_layer_is_frozen_and_thawed(model):
    optimizer = adamw(model)
    for step in range(STEPS):
        model.module.second.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@loop(unused=True)
def some_gradients_are_dropped(model):
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        model.module.second.weight.grad = None
        optimizer.step()


@loop()
def a_sharded_optimizer_of_torch(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    trained = [param for param in model.parameters() if param.requires_grad]
    train(model, ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=0.01))


@loop()
def a_schedule_and_saved_states(model):
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@loop(dtype=torch.bfloat16)
def sixteen_bits(model):
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step).bfloat16()).square().mean().backward()
        optimizer.step()


@loop(model=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last))
def channels_that_lie_last(model):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        model(x.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()


@loop()
def a_second_model_in_one_loss(model):
    other = type(model)(copy.deepcopy(model.module))
    optimizers = [adamw(model), adamw(other)]
    for step in range(STEPS):
        (loss_of(model, step) + 2 * value_of(other(batch(step, 1))).mean()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        model.module.head.bias += sum(param.sum() for param in other.parameters())


@loop()
def the_other_half_of_a_game(model):
    judge = model
    maker = type(model)(copy.deepcopy(model.module))
    of_judge, of_maker = adamw(judge), adamw(maker)
    for step in range(STEPS):
        of_judge.zero_grad()
        fake = value_of(maker(batch(step)))
        value_of(judge(fake.detach())).mean().backward()
        of_judge.step()
        of_maker.zero_grad()
        value_of(judge(fake)).square().mean().backward()
        of_maker.step()
        of_judge.zero_grad()
        of_judge.step()


def bits(model):
    found = {}
    for name, param in model.module.named_parameters():
        found[name] = param.detach().clone()
        found[f"{name}.grad"] = None if param.grad is None else param.grad.detach().clone()
    return found


def run(name, overlaps):
    function, options = LOOPS[name]
    torch.manual_seed(3)
    make = options.get("model", lambda: Net(options.get("ways", {})))
    module = make().to(options.get("dtype", torch.float32))
    theirs = nn.parallel.DistributedDataParallel(
        copy.deepcopy(module), gradient_as_bucket_view=True, find_unused_parameters=options.get("unused", False)
    )
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlaps, bucket_size=100)
    ours = DistributedDataParallel(copy.deepcopy(module), config, allow_unused=options.get("unused", False))
    function(theirs)
    function(ours)
    ours.finish_grad_sync()
    wanted, found = bits(theirs), bits(ours)
    return [
        key
        for key, value in wanted.items()
        if (value is None) != (found[key] is None) or (value is not None and not torch.equal(value, found[key]))
    ]


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    outcomes = {}
    for name in sys.argv[2:] or LOOPS:
        for overlaps in (False, True):
            outcomes[f"{name}, {'overlap' if overlaps else 'no overlap'}"] = run(name, overlaps)
    print(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
