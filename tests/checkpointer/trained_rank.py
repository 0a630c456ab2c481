"""A gloo rank that trains the GPT of the demo: `trained_rank.py FOLDER STEPS LOSSES [KILL_STEP SECONDS]`.

It goes on from the newest checkpoint that is whole, saves every third step in the background, and appends a line to the
file LOSSES for each step: its number, its loss, and a number made of the batch. It kills itself some seconds after the
beginning of a step.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

import trackbed
from tests.support import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from model import GPT, ModelConfig

BATCH_SIZE, MICRO_BATCH_SIZE, SEQUENCE = 4, 2, 32
BLEND = {"prefixes": {"a": 0.7, "b": 0.3}, "sequence_length": SEQUENCE, "size": 1000, "tokenizer": "bytes", "seed": 3}


def of_all_ranks(values):
    """`[ranks, K]` values of all ranks, of the `[K]` values of each."""
    found = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(found, values)
    return torch.stack(found)


def main():
    folder, steps, losses = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    kill_step, seconds = (int(sys.argv[4]), float(sys.argv[5])) if len(sys.argv) > 4 else (0, 0.0)
    dist.init_process_group("gloo")
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    loader = trackbed.BatchLoader(trackbed.open_blend(**BLEND, cache="cache").train, batch_size=MICRO_BATCH_SIZE)
    gpt = GPT(ModelConfig(vocab_size=256, sequence_length=SEQUENCE, width=96, layers=3))
    config = trackbed.DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=50_000
    )
    model = trackbed.DistributedDataParallel(gpt, config)
    adamw = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    optimizer = trackbed.DataParallelOptimizer(adamw, model, max_norm=1.0)
    kind = {"snapshot": "deferred"} if dist.get_world_size() == 1 else {"writer": "process"}
    with trackbed.Checkpointer("checkpoints", keep_last=2, **kind) as checkpointer, model.guarded():
        first = checkpointer.latest(verified=True) or 0
        if first:
            state = checkpointer.load_sharded_state(model, optimizer, step=first)
            loader.load_state_dict(state["loader"])
        batches = iter(loader)
        num_micro = BATCH_SIZE // MICRO_BATCH_SIZE // loader.num_ranks
        for step in range(first + 1, steps + 1):
            if step == kill_step:
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            checkpointer.poll()
            optimizer.zero_grad()
            own, sums = torch.zeros(num_micro, dtype=torch.float64), torch.zeros(num_micro, dtype=torch.int64)
            for micro in range(num_micro):
                batch = next(batches)
                with contextlib.nullcontext() if micro == num_micro - 1 else model.no_sync():
                    loss = gpt.loss(batch)
                    (loss / num_micro).backward()
                own[micro], sums[micro] = loss.item(), zlib.crc32(batch["tokens"].numpy().tobytes())
            optimizer.step()
            found = [of_all_ranks(values).T.flatten() for values in (own, sums)]  # in the order of the micro-batches
            if dist.get_rank() == 0:
                with losses.open("a") as file:
                    file.write(json.dumps([step, found[0].mean().item().hex(), found[1].tolist()]) + "\n")
            if step % 3 == 0:
                position = {"loader": loader.state_dict(), "step": step}
                checkpointer.save(step, {**trackbed.sharded_state(model, optimizer), **position})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
