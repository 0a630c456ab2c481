"""Times of training steps against PyTorch's, and whether the host waits for the GPU in them."""

import math
from pathlib import Path

import torch

from benchmarks.gpu.steps import Contenders, fp32_weights, measure_all, one_rank
from tests.gpu.card import DEVICE, IS_DRY, scaled
from tests.gpu.sections.install import seconds_of
from tests.gpu.sections.result import Result, run_section
from tests.gpu.syncs import num_kernels, num_syncs, profiled
from trackbed.optim import global_norm

RATIOS = {
    "S1 trackbed / plain, fp32 weights": ("large, fp32 weights", "trackbed", "plain", 1.05),
    "S2 trackbed torch / ddp": ("large, fp32 weights", "trackbed torch", "ddp", 1.03),
    "S2 trackbed sharded / ddp": ("large, fp32 weights", "trackbed sharded", "ddp", 1.06),
    "S7 small model, trackbed torch / ddp": ("small, fp32 weights", "trackbed torch", "ddp", 1.25),
    "S8 bf16 weights, trackbed / plain": ("large, bf16 weights", "trackbed bf16, fp32 gradients", "plain bf16", 1.05),
}


def run(out: Path, result: Result) -> None:
    """Measures all contenders, then counts waits and kernels of a step of each."""
    norm_of_many(result)
    count_waits(out, result)
    found = measure_all(device=DEVICE)
    for size, contenders in found.items():
        for name, figures in contenders.items():
            for unit, value in figures.items():
                result.figures[f"{size}: {name}, {unit}"] = value
    for name, (size, ours, theirs, wanted) in RATIOS.items():
        result.line(name, found[size][ours]["ms"] / found[size][theirs]["ms"], 100 if IS_DRY else wanted)
    fp32 = found["large, fp32 weights"]
    result.line("S4 peak memory of trackbed torch above ddp, GB", fp32["trackbed torch"]["GB"] - fp32["ddp"]["GB"], 0.3)


def norm_of_many(result: Result) -> None:
    """O7: the norm of as many gradients as the large model has."""
    gradients = torch.randn(scaled(407_000_000), device=DEVICE)
    wanted = math.sqrt(float(gradients.double().square().sum()))
    seconds = seconds_of(lambda: result.figures.update({"norm": global_norm([gradients])}))
    if abs(result.figures["norm"] / wanted - 1) > 1e-6:
        result.failed["O7 the norm"] = f"{result.figures['norm']} in place of {wanted}"
    result.line("O7 norm of 407 million numbers of float32, ms", seconds * 1000, 3.0)


def count_waits(out: Path, result: Result) -> None:
    """S3, S5: waits of the host and kernels, in the second of two profiled steps."""
    of = Contenders(DEVICE, *((32, 2, 64) if IS_DRY else (256, 24, 50_304)))
    tokens = torch.randint(0, of.size[2], (1, scaled(8000) + 1), device=DEVICE)[:, :1025]
    kernels, tensors = {}, len(list(of.model().parameters()))
    with one_rank("gloo" if IS_DRY else "nccl"):
        for name, make in fp32_weights(of).items():
            step = make()
            for _ in range(3):
                step(tokens)
            profile = profiled(lambda step=step: step(tokens))
            kernels[name] = num_kernels(profile)
            result.figures[f"waits of the host in a step, {name}"] = num_syncs(profile)
            (out / f"profile_{name.replace(' ', '_')}.txt").write_text(
                profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60)
            )
            result.figures[f"kernels of a step, {name}"] = kernels[name]
    waits = result.figures["waits of the host in a step, trackbed torch"]
    result.line("S3 waits of the host in a step of trackbed torch", waits, 1)
    more = (kernels["trackbed torch"] - kernels["ddp"]) / tensors
    result.line("S5 kernels of trackbed torch above ddp, per tensor", more, 1.2)


if __name__ == "__main__":
    run_section("steps", run)
