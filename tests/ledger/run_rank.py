"""One rank of a recorded run: `run_rank.py FOLDER RUN STEPS [STATE] [FAULT RANK]`. Writes its position as JSON."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import trackbed

GLOBAL_BATCH, MICRO_BATCH = 8, 2


def losses_of(batch):
    """A loss of each sample, made of its tokens."""
    return batch["tokens"].double().mean(1).sqrt()


def train(run, steps):
    loader = run.loader(batch_size=MICRO_BATCH)
    batches = iter(loader)
    for _ in range(steps):
        micro = [next(batches) for _ in range(GLOBAL_BATCH // MICRO_BATCH // loader.num_ranks)]
        run.record(torch.cat([losses_of(batch) for batch in micro]), grad_norm=torch.tensor(0.5))
        del micro


def main():
    folder, place, steps, saved, fault, rank = [*sys.argv[1:], *["-"] * 3][:6]
    dist.init_process_group("gloo")
    if fault == "folder" and dist.get_rank() == int(rank):
        place += "-other"
    if fault == "blend" and dist.get_rank() == int(rank):
        folder += "-gone"
    with trackbed.open_run(place, blend=f"{folder}/blend.toml") as run:
        if saved != "-" and Path(saved).exists():
            run.load_state_dict(json.loads(Path(saved).read_text()))
        if fault == "record" and dist.get_rank() == int(rank):
            run.record = lambda *_, **__: os._exit(0)
        train(run, int(steps))
        state = run.state_dict()
        if saved != "-" and dist.get_rank() == 0:
            Path(saved).write_text(json.dumps(state))
    print(json.dumps(state), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
