"""One of two ranks on the one GPU: `two_ranks.py BACKEND FOLDER`. Writes the outcome of each check as a line of JSON.

NCCL refuses two ranks on one GPU unless it takes them for two hosts; see `sections/two_ranks.py`. What ends the pair,
or leaves operations behind, comes last. A check that takes longer than its limit is reported, and ends the process.
"""

import contextlib
import dataclasses
import datetime as dt
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import trackbed
from tests.gpu import divided
from tests.gpu.card import DEVICE, IS_DRY, fewer
from tests.support.models.data_parallel import TYPES as ALL_TYPES
from tests.support.models.data_parallel import WAYS as ALL_WAYS
from tests.support.models.data_parallel import Case, reference, run_steps, wrap
from trackbed.comm import SOLO
from trackbed.errors import CollectiveError

WAYS = fewer(ALL_WAYS, "sharded, overlap, many buckets")
LIMIT_SECONDS = 25
GROUP_SECONDS = 10


class Boom(Exception):
    pass


def report(**found):
    print(json.dumps(found), flush=True)


def case_of(kind, way, **options):
    dtype, more = ALL_TYPES[kind]
    return Case(dtype, steps=4, device=DEVICE, options={**more, **ALL_WAYS[way], "collectives": "torch", **options})


def group():
    """A process group of its own, so that an operation that is left behind disturbs no other check."""
    return dist.new_group(timeout=dt.timedelta(seconds=GROUP_SECONDS))


def training(kind, way):
    """R1: the bits of one process that adds the gradients of two ranks; a sum of two has one order."""

    def check():
        case = case_of(kind, way)
        losses, wanted = reference(2, case)
        wrapper, optimizer = wrap(dist.group.WORLD, case)
        with wrapper.guarded():
            found = run_steps(wrapper, optimizer, case)
            state = optimizer.full_state_dict()
        tensors = {name: value.clone() for name, value in wrapper.state_dict().items()}
        outcome = type(wanted)(found[0], found[1], tensors, state)
        assert outcome.digest() == wanted.digest()
        assert found[0] == losses[dist.get_rank()]

    return check


def checkpoints(way):
    """R2: saved by two ranks, loaded by two and by one."""

    def check():
        folder = Path(sys.argv[2]) / f"checkpoint {way}".replace(", ", "-").replace(" ", "-")
        case = case_of("bf16 with fp32 gradients", way)
        wrapper, optimizer = wrap(dist.group.WORLD, case)
        run_steps(wrapper, optimizer, case, stop=2)
        trackbed.save(trackbed.sharded_state(wrapper, optimizer), folder)
        other, fresh = wrap(dist.group.WORLD, case)
        trackbed.load_sharded_state(folder, other, fresh)
        alone, of_one = wrap(SOLO, dataclasses.replace(case, options={**case.options, "collectives": "auto"}))
        trackbed.load_sharded_state(folder, alone, of_one, group=SOLO)
        saved = one_digest(optimizer.full_state_dict())
        assert one_digest(of_one.full_state_dict()) == saved
        run_steps(wrapper, optimizer, case, start=2)
        run_steps(other, fresh, case, start=2)
        assert all(map(torch.equal, wrapper.module.parameters(), other.module.parameters()))
        assert one_digest(optimizer.full_state_dict()) == one_digest(fresh.full_state_dict())

    return check


def one_digest(state):
    """The sum of all tensors of an optimizer's state."""
    return sum(float(value.double().sum()) for held in state["state"].values() for value in held.values())


def full_states():
    """R3: the same on both ranks."""
    case = case_of("bf16 with fp32 gradients", "sharded, overlap, many buckets")
    wrapper, optimizer = wrap(dist.group.WORLD, case)
    run_steps(wrapper, optimizer, case)
    found = [None, None]
    dist.all_gather_object(found, one_digest(optimizer.full_state_dict()))
    assert found[0] == found[1]


def broadcasts():
    """R4."""
    case = case_of("fp32", "sharded, no overlap, many buckets")
    wrapper, _ = wrap(dist.group.WORLD, case)
    with torch.no_grad():
        for parameter in wrapper.module.parameters():
            parameter.fill_(dist.get_rank() + 1)
    wrapper.broadcast_params()
    assert all(bool((parameter == 1).all()) for parameter in wrapper.module.parameters())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def failing(where, *, reads_loss=False):
    """R5, R7, R8: rank 1 fails, and rank 0 names it, is free again, and can save what it has."""

    def check():
        own = group()
        model = Model().to(DEVICE)
        config = trackbed.DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            bucket_size=5000,
            collectives="torch",
        )
        wrapper = trackbed.DistributedDataParallel(model, config, process_group=own)
        optimizer = trackbed.DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), wrapper)
        is_failing, failed, error = dist.get_rank() == 1, [], None
        folder = Path(sys.argv[2]) / f"failing {where}"

        def boom(*_):
            failed.append(time.time())
            raise Boom("the original message")

        try:
            with wrapper.guarded():
                for step in range(4):
                    if is_failing and where == "before a step" and step == 2:
                        boom()
                    if is_failing and where == "in a hook" and step == 2:
                        model.layers[1].weight.register_hook(boom)
                    optimizer.zero_grad()
                    loss = wrapper(torch.ones(8, 64, device=DEVICE)).square().mean()
                    loss.backward()
                    if reads_loss:
                        loss.item()
                    if is_failing and where == "before the update" and step == 2:
                        boom()
                    optimizer.step()
                if is_failing and where == "in the last step":
                    boom()
                if where == "in a save":
                    state = trackbed.sharded_state(wrapper, optimizer)
                    if is_failing:
                        boom()
                    trackbed.save(state, folder, group=own)
                if is_failing and where == "an extra step":
                    failed.append(time.time())
                    optimizer.zero_grad()
                    wrapper(torch.ones(8, 64, device=DEVICE)).square().mean().backward()
                    optimizer.step()
        except (Boom, trackbed.TrackbedError) as caught:
            error, raised = caught, time.time()
        times = [None, None]
        dist.all_gather_object(times, failed, group=GLOO)
        assert error is not None, "no error"
        if is_failing and where != "an extra step":
            assert isinstance(error.__cause__ or error, Boom), repr(error)
            return
        assert isinstance(error, CollectiveError), repr(error)
        if not is_failing:
            assert "rank 1" in str(error), str(error)
            seconds = raised - times[1][0]
            assert seconds < 5, f"{seconds:.1f} s"
            began = time.time()
            if not IS_DRY:
                torch.cuda.synchronize()
            assert time.time() - began < 5
            with tempfile.TemporaryDirectory() as emergency:
                torch.save(model.state_dict(), Path(emergency) / "model.pt")

    return check


def killed():
    """R6: rank 1 is killed in its third step."""
    wrapper = trackbed.DistributedDataParallel(
        Model().to(DEVICE),
        trackbed.DistributedDataParallelConfig(overlap_grad_reduce=True, collectives="torch"),
        process_group=group(),
    )
    optimizer = trackbed.DataParallelOptimizer(torch.optim.AdamW(wrapper.parameters(), lr=0.01), wrapper)
    caught = "no error"
    try:
        with wrapper.guarded():
            for step in range(100):
                optimizer.zero_grad()
                wrapper(torch.ones(8, 64, device=DEVICE)).square().mean().backward()
                if dist.get_rank() == 1 and step == 2:
                    os.kill(os.getpid(), 9)
                optimizer.step()
    except CollectiveError as error:
        caught = str(error)
    assert "rank 1" in caught, caught


def checks():
    """Name and function of each check, in order."""
    for kind in ("fp32", "bf16 with fp32 gradients"):
        for way in WAYS:
            yield f"training, {kind}, {way}", training(kind, way)
    for way in WAYS:
        if "overlap, many" in way:
            yield f"checkpoints, {way}", checkpoints(way)
    if IS_DRY or sys.argv[1] == "nccl":  # FSDP2 does not run over gloo on a GPU
        yield from divided.checks(Path(sys.argv[2]))
    yield "full states", full_states
    yield "broadcasts", broadcasts
    yield "an extra step", failing("an extra step")
    for where in ("before a step", "in a save", "in the last step", "before the update", "in a hook"):
        yield f"rank 1 raises {where}", failing(where)
    yield "rank 1 raises in a hook, rank 0 reads the loss", failing("in a hook", reads_loss=True)
    yield "rank 1 is killed", killed


@contextlib.contextmanager
def limited(name):
    """Ends the process if the block takes too long: what hangs cannot be ended otherwise."""

    def end():
        report(name=name, outcome="failed", why=f"hung for {LIMIT_SECONDS} s")
        os._exit(1)

    timer = threading.Timer(LIMIT_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main():
    global GLOO
    if not IS_DRY:
        torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(sys.argv[1], timeout=dt.timedelta(seconds=GROUP_SECONDS))
    GLOO = dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=LIMIT_SECONDS))
    with limited("connect"):
        dist.all_reduce(torch.ones(4, device=DEVICE))
        if not IS_DRY:
            torch.cuda.synchronize()
    for name, check in checks():
        began = time.time()
        with limited(name):
            try:
                dist.barrier(GLOO)
                check()
            except Exception:
                text = traceback.format_exc()
                report(name=name, outcome="failed", why=text[-1500:], seconds=time.time() - began)
            else:
                report(name=name, outcome="passed", seconds=time.time() - began)
    os._exit(0)  # operations that are left would keep the process


if __name__ == "__main__":
    main()
