"""`python -m benchmarks.saves_in_training`: how much slower training is that saves every ten steps.

The GPT of 42 million parameters of `benchmarks.grads`, with a sharded optimizer, on two ranks of one thread: 0.5 GB of
parameters and states. Blocks of ten steps that begin with a save in the background, and have waited for it at the end,
take turns with blocks without. Each checkpoint is verified afterwards, outside of the time.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.grads import BUCKET, VOCABULARY, adamw, new_model
from benchmarks.harness import machine, run_on_ranks
from trackbed import (
    Checkpointer,
    DataParallelOptimizer,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    sharded_state,
)

BLOCKS, STEPS = 30, 10
ROWS, TOKENS = 2, 128


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Prints the times of both kinds of blocks, on rank 0."""
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=BUCKET
    )
    model = DistributedDataParallel(new_model(), config)
    optimizer = DataParallelOptimizer(adamw(model.module), model, max_norm=1.0)
    batches = torch.Generator().manual_seed(2 + dist.get_rank())
    blocks: dict[str, list[float]] = {"without": [], "with": []}
    whole = 0
    with Checkpointer(folder, keep_last=1, writer=options.writer, snapshot=options.snapshot) as checkpointer:
        for number in range(-1, 2 * options.blocks):
            saves = number % 2 == 0
            dist.barrier()
            start = time.perf_counter()
            for step in range(STEPS):
                if saves and step == 0:
                    checkpointer.save(number, sharded_state(model, optimizer))
                optimizer.zero_grad()
                model(torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=batches)).backward()
                optimizer.step()
                checkpointer.poll()
            checkpointer.wait()
            seconds = time.perf_counter() - start
            if number < 0:
                checkpointer.prepare(sharded_state(model, optimizer))
                continue
            blocks["with" if saves else "without"].append(seconds)
            if saves:
                whole += checkpointer.latest(verified=True) == number
        blocked = statistics.median(record.blocked_seconds for record in checkpointer.history)
        total = statistics.median(record.total_seconds or 0 for record in checkpointer.history)
        num_bytes = checkpointer.history[-1].num_bytes
    medians = torch.tensor([statistics.median(times) for times in blocks.values()] + [blocked, total])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    without, with_saves, blocked, total = medians.tolist()
    if dist.get_rank() == 0:
        print(f"{num_bytes / 1e9:.2f} GB a rank; {whole} of {options.blocks} checkpoints whole")
        print(f"{STEPS} steps without a save {without:.3f} s, with one {with_saves:.3f} s: {with_saves / without:.3f}x")
        print(f"save: blocked {blocked * 1e3:.0f} ms, {total:.2f} s in all")


def main() -> int:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="blocks of each kind")
    parser.add_argument("--writer", choices=["thread", "process"], default="thread")
    parser.add_argument("--snapshot", choices=["copied", "deferred"], default="copied")
    parser.add_argument("--folder", help="folder on the disk that is measured")
    options = parser.parse_args()
    if "RANK" in os.environ:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measure(Path(os.environ["TRACKBED_BENCH_FOLDER"]), options)
        dist.destroy_process_group()
        return 0
    print(f"{machine()}, torch {torch.__version__}, {options.ranks} ranks of one thread", flush=True)
    return run_on_ranks("benchmarks.saves_in_training", options.ranks, options.folder)


if __name__ == "__main__":
    sys.exit(main())
