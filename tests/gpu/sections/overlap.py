"""How much of slow collectives a backward pass hides. One card has no network, so `DelayedCollectives` imitate one."""

from pathlib import Path
from typing import Any

import torch

import trackbed
from benchmarks.gpu.steps import Contenders, adamw
from tests.gpu.card import DEVICE, IS_DRY
from tests.gpu.delayed import DelayedCollectives
from tests.gpu.sections.install import seconds_of
from tests.gpu.sections.result import Result, run_section
from trackbed.grads import model_agreement

STEPS = 2 if IS_DRY else 8


def seconds_of_step(of: Contenders, tokens: torch.Tensor, seconds_per_byte: float, **options: Any) -> float:
    """Median time of a step of two micro-batches."""
    collectives = DelayedCollectives(0.0, seconds_per_byte=seconds_per_byte)
    solo = model_agreement.SoloCollectives
    model_agreement.SoloCollectives = lambda: collectives
    try:
        config = trackbed.DistributedDataParallelConfig(**options)
        wrapper = trackbed.DistributedDataParallel(of.model(), config)
    finally:
        model_agreement.SoloCollectives = solo
    optimizer = trackbed.DataParallelOptimizer(adamw(wrapper.parameters()), wrapper, max_norm=1.0)

    def step() -> None:
        optimizer.zero_grad()
        with wrapper.no_sync():
            of.loss(wrapper, tokens, autocasts=True).backward()
        of.loss(wrapper, tokens, autocasts=True).backward()
        optimizer.step()

    def steps() -> None:
        for _ in range(STEPS):
            step()

    # Several between two waits for the GPU: the gathers that end a step run beside the next one.
    return seconds_of(steps, 1 if IS_DRY else 2) / STEPS


def run(out: Path, result: Result) -> None:
    """V1: the hidden share of operations that together take half of the time of the last backward pass."""
    of = Contenders(DEVICE, *((32, 2, 64) if IS_DRY else (1024, 12, 50_304)))
    tokens = torch.randint(0, of.size[2], (1 if IS_DRY else 8, 9 if IS_DRY else 2049), device=DEVICE)
    num_bytes = sum(parameter.nbytes for parameter in of.model().parameters())
    # The gradients of the first bucket of parameters arrive last, with nothing left to hide its reduction.
    size = {"bucket_size": None if IS_DRY else 12_000_000}
    for is_sharded in (False, True):
        options = {"use_distributed_optimizer": is_sharded, "overlap_param_gather": is_sharded, **size}
        none = seconds_of_step(of, tokens, 0.0, overlap_grad_reduce=True, **options)
        # A backward pass is a third of a step of two; a sharded optimizer gathers as many bytes as it reduces.
        delay = none / 6 / num_bytes / (2 if is_sharded else 1)
        hidden = seconds_of_step(of, tokens, delay, overlap_grad_reduce=True, **options)
        options["overlap_param_gather"] = False
        shown = seconds_of_step(of, tokens, delay, overlap_grad_reduce=False, **options)
        name = "sharded" if is_sharded else "not sharded"
        result.figures |= {f"{name}: step, ms": none * 1e3, f"{name}: with overlap, ms": hidden * 1e3}
        result.figures[f"{name}: without overlap, ms"] = shown * 1e3
        share = 1 - (hidden - none) / (shown - none)
        result.line(f"V1 hidden share, {name}", share, -1000 if IS_DRY else 0.8, at_least=True)


if __name__ == "__main__":
    run_section("overlap", run)
