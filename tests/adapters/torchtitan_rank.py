"""A rank that trains with torchtitan's parts: `torchtitan_rank.py FOLDER LAST_STEP SAVED [MANAGER]`.

torchtitan's trainer needs a GPU. So this has the order of its calls, its optimizers and schedules, and FSDP2 on gloo.
MANAGER is "own" or "torchtitan": whose checkpoint manager saves and loads.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from tests.adapters.training import SEQUENCE, STEP, STEPS, Model, digests, loss_of, say
from trackbed.adapters.torchtitan import BlendDataLoader, FolderCheckpointManager


class TrainState:
    """Number of steps, as torchtitan's trainer keeps it."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main():
    folder, last, saved = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    manager = CheckpointManager if sys.argv[4:] == ["torchtitan"] else FolderCheckpointManager
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = fully_shard(Model())
    optimizer = default_adamw(lr=1e-2)
    optimizer.implementation = "foreach"
    optimizers = optimizer.build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=5).build(optimizers=optimizers, training_steps=STEPS)
    loader = BlendDataLoader.Config(blend=str(folder / "blend.toml")).build(
        dp_world_size=size, dp_rank=rank, tokenizer=None, seq_len=SEQUENCE, local_batch_size=STEP // size
    )
    train_state = TrainState()
    config = manager.Config(enable=True, folder="checkpoint", interval=4, last_save_model_only=False, keep_latest_k=2)
    checkpointer = config.build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedules,
        states={"train_state": train_state},
        sd_adapter=None,
        base_folder=str(saved),
    )
    checkpointer.load(step=-1)
    batches = iter(loader)
    while train_state.step < last:
        train_state.step += 1
        inputs, labels = next(batches)
        optimizers.zero_grad()
        loss = loss_of(model(inputs["input"]), labels)
        loss.backward()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedules.step()
        say(train_state.step, digests(inputs["input"], labels), loss)
        checkpointer.save(train_state.step, last_step=train_state.step == last)
    checkpointer.maybe_wait_for_saving()
    checkpointer.close()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # FSDP2 on gloo may hang at the end of the process


if __name__ == "__main__":
    main()
