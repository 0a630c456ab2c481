"""`python -m benchmarks.recording`: what the record of a run costs the thread that trains, as a Markdown table.

Two ranks of 8 samples of 4,096 tokens each, whose steps take about 30 ms. `Run.record` is timed on rank 0; lines are
those of `steps.jsonl`.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import trackbed
from benchmarks.harness import machine, run_on_ranks

RANKS, BATCH, LENGTH, STEPS, WARM_UP = 2, 8, 4096, 200, 10
DATASETS = (2, 8, 40)


def write_blend(folder: Path, num_datasets: int) -> None:
    """Writes the pairs and the blend file of a run."""
    rng = np.random.default_rng(1)
    text = (
        f'version = 1\nsequence_length = {LENGTH}\norder = "instant"\nsplit = "1"\nsize = {{train = {10**6}}}\n'
        "tokenizer = {eod = 0, vocab_size = 1000}\n"
    )
    for number in range(num_datasets):
        prefix = folder / f"{number}"
        builder = trackbed.tokens.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
        builder.add_documents(rng.integers(1, 1000, 20 * LENGTH, dtype=np.uint16), [LENGTH] * 20)
        builder.finalize(f"{prefix}.idx")
        text += f'[[dataset]]\npath = "{prefix}"\nweight = 1\n'
    (folder / "blend.toml").write_text(text)


def train(folder: Path, num_datasets: int) -> None:
    """One rank of a run; rank 0 makes its data, and prints a row of the table."""
    if dist.get_rank() == 0:
        write_blend(folder, num_datasets)
    dist.barrier()
    matrix, seconds = torch.rand(600, 600), []
    with trackbed.open_run(folder / "run", blend=folder / "blend.toml") as run:
        batches = iter(run.loader(batch_size=BATCH))
        for _ in range(STEPS):
            losses = next(batches)["tokens"].double().mean(1)
            stop = time.perf_counter() + 0.03
            while time.perf_counter() < stop:
                matrix @ matrix
            dist.barrier()
            started = time.perf_counter()
            run.record(losses, grad_norm=1.0, lr=1e-3)
            seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        kept = sorted(seconds[WARM_UP:])
        lines = (folder / "run" / "steps.jsonl").read_bytes().splitlines(keepends=True)
        figures = [1e3 * one for one in (statistics.median(kept), kept[int(0.99 * len(kept))], kept[-1])]
        row = " | ".join(f"{one:.3f}" for one in figures)
        sizes = f"{statistics.median(map(len, lines)):,.0f} | {max(map(len, lines)):,}"
        print(f"| {num_datasets} | {row} | {sizes} |", flush=True)


def main() -> int:
    """Prints the table; a process that has a rank trains."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        for num_datasets in DATASETS:
            folder = Path(os.environ["TRACKBED_BENCH_FOLDER"]) / str(num_datasets)
            folder.mkdir(exist_ok=True)
            train(folder, num_datasets)
        dist.barrier()
        os._exit(0)  # gloo may abort at the end of the interpreter
    print(f"`Run.record` on {machine()}: milliseconds for which it holds the thread, and bytes of a line.\n")
    print(
        "| datasets | median | 99 % | longest | median bytes | longest line |\n|---:|---:|---:|---:|---:|---:|",
        flush=True,
    )
    return run_on_ranks("benchmarks.recording", RANKS, None)


if __name__ == "__main__":
    sys.exit(main())
