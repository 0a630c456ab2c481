"""What the programs of trainers share: a small model, and lines that say what a step was made of."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import trackbed
from tests.support.processes.launching import run_script

SEQUENCE, STEP, STEPS = 64, 4, 20
"""Tokens of a sample, samples of a step of all ranks, and steps of a whole run."""


class Model(torch.nn.Module):
    """Predicts the next token from the last one alone."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(257, 16)
        self.head = torch.nn.Linear(16, 257)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def digests(tokens, labels):
    """One name for each sample of a batch, made of its tokens and labels, of which -100 have no loss."""
    return [
        hashlib.sha256(sample.contiguous().to(torch.int64).numpy().tobytes()).hexdigest()[:16]
        for sample in torch.cat([tokens, labels], 1)
    ]


def masked(labels, loss_mask):
    return labels.masked_fill(loss_mask == 0, -100)


def expected(folder, form=masked):
    """Samples of each step, as `BatchLoader` returns them on one rank."""
    loader = trackbed.BatchLoader(
        trackbed.open_blend(folder / "blend.toml").train, batch_size=STEP, rank=0, num_ranks=1
    )
    return [
        digests(batch["tokens"], form(batch["labels"], batch["loss_mask"]))
        for _, batch in zip(range(STEPS), loader, strict=False)
    ]


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def say(step, samples, loss):
    """Notes a step. Trainers print lines of their own."""
    with Path(os.environ["STEPS_OF_RANKS"], os.environ["RANK"]).open("a") as file:
        file.write(json.dumps([step, samples, float(loss).hex()]) + "\n")


def run(script, size, *arguments, **options):
    """Runs a program on ranks. Returns what each rank has noted."""
    with tempfile.TemporaryDirectory() as folder:
        run_script(script, size, *arguments, limit_seconds=120, STEPS_OF_RANKS=folder, parses=False, **options)
        paths = [Path(folder, str(rank)) for rank in range(size)]
        return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths if path.exists()]


def losses_of(lines):
    """Losses of each rank."""
    return [[loss for *_, loss in of_rank] for of_rank in lines]


def train_step(model, optimizer, tokens, labels):
    """Makes a step on all ranks. Returns the loss of this one."""
    optimizer.zero_grad()
    loss = loss_of(model(tokens), labels)
    loss.backward()
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()
    return loss.item()


def check_steps(lines, wanted, losses=None, *, first=0, last=STEPS):
    """Compares what ranks have noted with the samples of each step, and with the losses of another run.

    Args:
        lines: of each rank, its steps.
        wanted: samples of each step of a whole run.
        losses: of each rank, the losses of all steps of another run; None where ranks differ.
        first: steps that were made before.
        last: last step of these.
    """
    assert [[step for step, *_ in of_rank] for of_rank in lines] == [[*range(first + 1, last + 1)]] * len(lines)
    for number, of_step in enumerate(zip(*lines, strict=True), first):
        assert sorted(name for _, samples, _ in of_step for name in samples) == sorted(wanted[number]), number + 1
    if losses is not None:
        assert losses_of(lines) == [of_rank[first:last] for of_rank in losses]


both_tiers = pytest.mark.parametrize("is_compared", [False, pytest.param(True, marks=pytest.mark.slow)])
"""Whether a run is compared with one that was not stopped, for which it is made twice more."""


def check_runs(train, wanted, tmp_path, is_compared, copy=shutil.copytree):
    """Checks a run that stops and goes on on fewer ranks, and on as many with the losses of a whole one.

    Args:
        train: trains on some ranks up to a step, from what is saved at a path. Returns what ranks have noted.
        wanted: samples of each step.
        tmp_path: folder of what is saved.
        is_compared: False without the whole one.
        copy: copies what is saved.
    """
    losses = None
    if is_compared:
        whole = train(2, STEPS, tmp_path / "whole")
        check_steps(whole, wanted)
        losses = losses_of(whole)
    check_steps(train(2, 8, tmp_path / "saved"), wanted, losses, last=8)
    if is_compared:
        copy(tmp_path / "saved", tmp_path / "copy")
        check_steps(train(2, STEPS, tmp_path / "copy"), wanted, losses, first=8)
    check_steps(train(1, STEPS, tmp_path / "saved"), wanted, first=8)
