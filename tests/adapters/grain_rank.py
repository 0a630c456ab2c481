"""A rank that trains from Grain: `grain_rank.py FOLDER LAST_STEP STATE`, with a state that it goes on from."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import trackbed
from tests.adapters.training import STEP, Model, digests, masked, say, train_step
from trackbed.adapters.grain import MicroBatches, batch_iterator


def main():
    folder, last, saved = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    source = MicroBatches(trackbed.open_blend(folder / "blend.toml").train, STEP // 2)
    batches = batch_iterator(source, micro_batches_per_step=2, rank=rank, num_ranks=num_ranks)
    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        batches.set_state(json.loads(state["batches"]))
        first = state["step"]
    for step in range(first + 1, last + 1):
        batch = {name: torch.from_numpy(array) for name, array in next(batches).items()}
        labels = masked(batch["labels"], batch["loss_mask"])
        loss = train_step(model, optimizer, batch["tokens"], labels)
        say(step, digests(batch["tokens"], labels), loss)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": last}
    if rank == 0:
        torch.save({**state, "batches": json.dumps(batches.get_state())}, saved)
    batches.close()
    dist.barrier()
    os._exit(0)  # torch's wrapper on gloo aborts at the end of the interpreter in some runs


if __name__ == "__main__":
    main()
