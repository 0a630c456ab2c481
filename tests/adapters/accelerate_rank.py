"""A rank that trains with accelerate: `accelerate_rank.py FOLDER LAST_STEP SAVED`, from a state where there is one."""

import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import trackbed
from tests.adapters.training import STEP, Model, digests, loss_of, masked, say
from trackbed.adapters.accelerate import register_loader


class Steps:
    """Number of steps, kept with the rest."""

    number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def main():
    folder, last, saved = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train = trackbed.open_blend(folder / "blend.toml").train
    loader = trackbed.BatchLoader(train, batch_size=STEP // accelerator.num_processes)
    steps = Steps()
    register_loader(accelerator, loader)
    accelerator.register_for_checkpointing(steps)
    if saved.exists():
        accelerator.load_state(str(saved))
    for batch in loader:
        labels = masked(batch["labels"], batch["loss_mask"])
        loss = loss_of(model(batch["tokens"]), labels)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        steps.number += 1
        say(steps.number, digests(batch["tokens"], labels), loss)
        if steps.number == last:
            break
    accelerator.save_state(str(saved))
    accelerator.wait_for_everyone()
    os._exit(0)  # torch's wrapper on gloo may hang when it is taken apart


if __name__ == "__main__":
    main()
