"""Operations of a training loop, at which ranks wait for each other."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import trackbed


@dataclass
class Run:
    """A training inside `guarded()`."""

    model: Any
    optimizer: Any
    folder: Path
    group: Any

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def state(self):
        return trackbed.sharded_state(self.model, self.optimizer, group=self.group)


@contextlib.contextmanager
def training(folder, group=None, **options):
    """Begins a training whose ranks have taken a step and saved a checkpoint."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 3)
    config = trackbed.DistributedDataParallelConfig(use_distributed_optimizer=True, **options)
    model = trackbed.DistributedDataParallel(module, config, process_group=group)
    optimizer = trackbed.DataParallelOptimizer(torch.optim.AdamW(module.parameters()), model)
    run = Run(model, optimizer, Path(folder), group)
    run.step()
    trackbed.save(run.state(), run.folder / "step-0", group=group)
    with model.guarded():
        run.step()
        yield run


OPERATIONS = {
    "step": Run.step,
    "save": lambda run: trackbed.save({"step": 1}, run.folder / "step-1", group=run.group),
    "load": lambda run: trackbed.load(run.folder / "step-0", group=run.group),
    "load_sharded_state": lambda run: trackbed.load_sharded_state(
        run.folder / "step-0", run.model, run.optimizer, group=run.group
    ),
    "sharded_state": Run.state,
    "full_state_dict": lambda run: run.optimizer.full_state_dict(),
    "latest_checkpoint": lambda run: trackbed.latest_checkpoint(run.folder, group=run.group),
    "agree": lambda run: run.model.agree(True),
    "leave": lambda run: None,
}
