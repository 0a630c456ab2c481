"""Trains a GPT on a blend, as a whole run: recorded, evaluated, saved in the background, and resumed by itself.

    python examples/pretrain_gpt.py run.toml
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py run.toml
    torchrun --nnodes 1:2 --max-restarts 3 --nproc-per-node 2 examples/pretrain_gpt.py run.toml

Started again, it goes on behind the newest whole checkpoint, on any number of ranks. With `--max-restarts`, set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: otherwise ranks that torchrun starts again may find the addresses of those before
them (torch 2.13). SIGTERM and SIGUSR1 end each process with a checkpoint and status 0; torchrun passes SIGTERM on, and
then ends with 1. `tail -f runs/first/steps.jsonl` shows how it goes, `trackbed report runs/first` draws it. Keys of the
file, of which the first four are needed:

    run = "runs/first"             # folder of the record and the checkpoints
    blend = "blend.toml"           # the data, with a tokenizer
    steps = 100                    # of the whole run
    global_batch_size = 8          # samples of a step; or [[0, 8], [50, 16]]: 8 from the start, 16 behind step 50
    micro_batch_size = 4           # samples of a rank that are in memory at a time
    parallel = "ddp"               # or "fsdp2"
    checkpoint_every = 20          # steps; the last one is saved, too
    keep_checkpoints = 3
    writer = "thread"              # or "process", which writes the checkpoints beside each rank
    eval_every = 50                # steps between evaluations of the valid split; 0 for none, and without that split
    skip = [[100, 199]]            # first and last position of samples to leave out, by default none
    [model]                        # width = 192, heads = 6, layers = 6
    [optimizer]                    # learning_rate = 6e-4, weight_decay = 0.01, warmup_steps = 20, max_norm = 1.0, seed

Paths are relative to the folder of the file.
"""

import argparse
import contextlib
import math
import os
import re
import signal
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import torch.distributed as dist
from model import GPT, ModelConfig
from torch.distributed.fsdp import fully_shard

import trackbed


@dataclass(frozen=True)
class ModelSize:
    """Table `[model]`."""

    width: int = 192
    heads: int = 6
    layers: int = 6


@dataclass(frozen=True)
class OptimizerOptions:
    """Table `[optimizer]`."""

    learning_rate: float = 6e-4
    weight_decay: float = 0.01
    warmup_steps: int = 20
    max_norm: float = 1.0
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The file of a run."""

    run: str
    blend: str
    steps: int
    global_batch_size: int | list[list[int]]
    micro_batch_size: int = 4
    parallel: Literal["ddp", "fsdp2"] = "ddp"
    checkpoint_every: int = 20
    keep_checkpoints: int = 3
    writer: Literal["thread", "process"] = "thread"
    eval_every: int = 50
    skip: list[list[int]] = field(default_factory=list)
    model: ModelSize = field(default_factory=ModelSize)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)

    def batch_size_of(self, step: int) -> int:
        """Samples of a step, from 0 on."""
        if isinstance(self.global_batch_size, int):
            return self.global_batch_size
        return next(size for first, size in reversed(self.global_batch_size) if first <= step)


TABLES = {"": RunConfig, "model": ModelSize, "optimizer": OptimizerOptions}
LEAST = {
    **dict.fromkeys(
        ("steps", "micro_batch_size", "checkpoint_every", "keep_checkpoints", "width", "heads", "layers"), 1
    ),
    **dict.fromkeys(("eval_every", "warmup_steps", "weight_decay", "learning_rate", "seed"), 0),
}
"""Lowest value of numbers in the file."""
KINDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    list[list[int]]: "a list of pairs of whole numbers",
    int | list[list[int]]: "a whole number, or a list of pairs of whole numbers",
}
"""Names of types in messages."""


def read_config(path: Path) -> RunConfig:
    """Reads the file of a run. Exits with a message if it is wrong."""
    try:
        text = path.read_text()
        table = tomllib.loads(text)
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")
    for name, kind in TABLES.items():
        given = table.get(name, {}) if name else table
        if not isinstance(given, dict):
            sys.exit(f"{path}:{line_of(name, text)}: {name} must be a table, found {given!r}")
        hints = get_type_hints(kind)
        for key, value in given.items():
            problem = None if not name and key in TABLES else problem_of(key, value, hints, name)
            if problem:
                sys.exit(f"{path}:{line_of(key, text, name)}: {problem}, found {key} = {value!r}")
    missing = [name for name in ("run", "blend", "steps", "global_batch_size") if name not in table]
    if missing:
        sys.exit(f"{path}: must have {', '.join(missing)}")
    config = RunConfig(
        **{name: value for name, value in table.items() if name not in TABLES},
        model=ModelSize(**table.get("model", {})),
        optimizer=OptimizerOptions(**table.get("optimizer", {})),
    )
    if not (path.parent / config.blend).is_file():
        sys.exit(
            f"{path}:{line_of('blend', text)}: blend must be a blend file, found none: {path.parent / config.blend}"
        )
    if (path.parent / config.run).exists() and not (path.parent / config.run).is_dir():
        sys.exit(f"{path}:{line_of('run', text)}: run must be a folder, found a file: {path.parent / config.run}")
    if config.model.width % config.model.heads:
        sys.exit(f"{path}: width must be a multiple of heads, found {config.model.width} and {config.model.heads}")
    return config


def line_of(key: str, text: str, table: str = "") -> int:
    """Number of the line that has a key, in a table."""
    head = re.search(rf"^\s*\[\s*{table}\s*\]", text, re.MULTILINE) if table else None
    start = 0 if head is None else head.end()
    found = re.compile(rf"""^\s*[\["']*(?:{table}\s*\.\s*)?{re.escape(key)}\b""", re.MULTILINE).search(text, start)
    return 1 if found is None else 1 + text[: found.end()].count("\n")


def problem_of(key: str, value: Any, hints: dict[str, Any], table: str) -> str | None:
    """Says what must hold for a value of the file and does not, if anything."""
    if key not in hints:
        return f"keys of {f'[{table}]' if table else 'the file'} must be {', '.join(hints)}"
    if not is_of(value, hints[key]):
        return f"{key} must be {KINDS.get(hints[key]) or ' or '.join(map(repr, get_args(hints[key])))}"
    if isinstance(value, int | float) and value < LEAST.get(key, value):
        return f"{key} must be at least {LEAST[key]}"
    if key == "global_batch_size":
        pairs = value if isinstance(value, list) else [[0, value]]
        firsts = [pair[0] for pair in pairs if len(pair) == 2 and pair[1] >= 1]
        if len(firsts) < len(pairs) or firsts != sorted(set(firsts)) or firsts[:1] != [0]:
            return f"{key} must be at least 1, or rising pairs of a step and the size behind it, the first of step 0"
    if key == "skip" and any(len(pair) != 2 or not 0 <= pair[0] <= pair[1] for pair in value):
        return f"{key} must be pairs of a first and a last position"
    return None


def is_of(value: Any, kind: Any) -> bool:
    """True if a value of TOML is of a type."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in parts
    if origin is list:
        return isinstance(value, list) and all(is_of(one, parts[0]) for one in value)
    if isinstance(kind, UnionType):
        return any(is_of(value, part) for part in parts)
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


class Waits:
    """Observer of the buffers of gradients that adds up the time for which this rank waits for others."""

    seconds = 0.0

    def ready(self, label: Any) -> None:
        """The gradients of some buckets have arrived."""

    def issued(self, label: Any, kind: str, num_bytes: int, num_ranks: int, work: Any) -> None:
        """An operation was issued."""

    def waited(self, start: float, stop: float) -> None:
        """The rank has waited for one."""
        self.seconds += stop - start

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Replicas:
    """The model on every rank, with Trackbed's buffers of gradients and a sharded optimizer."""

    def __init__(self, gpt: GPT, options: OptimizerOptions) -> None:
        config = trackbed.DistributedDataParallelConfig(
            overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=500_000
        )
        self.waits = Waits()
        self.model = trackbed.DistributedDataParallel(gpt, config, observer=self.waits)
        adamw = torch.optim.AdamW(gpt.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
        self.optimizer = trackbed.DataParallelOptimizer(adamw, self.model, max_norm=options.max_norm)
        self.adamw = adamw

    def micro_step(self, *, is_last: bool) -> Any:
        """Surrounds a micro-batch: gradients are reduced in the last one of a step."""
        return contextlib.nullcontext() if is_last else self.model.no_sync()

    def step(self) -> float:
        """Updates the parameters. Returns the norm of the gradients."""
        report = self.optimizer.step()
        self.optimizer.zero_grad()
        return report.norm


class Sharded:
    """The model divided among the ranks by FSDP2, with torch's optimizer."""

    def __init__(self, gpt: GPT, options: OptimizerOptions) -> None:
        for block in gpt.blocks:
            fully_shard(block)
        self.model = fully_shard(gpt)
        self.waits = Waits()  # FSDP does not report its waits: stays 0
        self.max_norm = options.max_norm
        self.optimizer = self.adamw = torch.optim.AdamW(
            gpt.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
        )

    def micro_step(self, *, is_last: bool) -> Any:
        """Surrounds a micro-batch: gradients are reduced in the last one of a step."""
        self.model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    def step(self) -> float:
        """Updates the parameters. Returns the norm of the gradients."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def train(config: RunConfig, run: trackbed.Run, checkpointer: trackbed.Checkpointer) -> bool:
    """Trains from the newest checkpoint on. Returns False if a signal has ended it before the last step."""
    torch.set_num_threads(1)  # another number of threads would change the last bits of a product
    torch.manual_seed(config.optimizer.seed)
    torch.use_deterministic_algorithms(mode=True)
    data = run.train.config
    sizes = {"vocab_size": data.tokenizer.vocab_size, "sequence_length": data.sequence_length}
    gpt = GPT(ModelConfig(**sizes, **asdict(config.model)))
    trained = (Replicas if config.parallel == "ddp" else Sharded)(gpt, config.optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(trained.adamw, lambda step: learning_rate_at(step, config))
    loader = run.loader(batch_size=config.micro_batch_size, skip=config.skip)
    micro_batch = config.micro_batch_size * loader.num_ranks
    if config.eval_every and not any(map(len, run.splits.validation_sets)):
        sys.exit("eval_every must be 0 for a blend without samples of its valid split")
    wrong = [size for step in range(config.steps) if (size := config.batch_size_of(step)) % micro_batch]
    if wrong:
        sys.exit(f"global_batch_size must be a multiple of micro_batch_size x ranks = {micro_batch}, found {wrong[0]}")
    step = checkpointer.latest(verified=True)
    if step is not None:
        state = checkpointer.load_sharded_state(trained.model, trained.optimizer, step=step)
        schedule.load_state_dict(state["schedule"])
        run.load_state_dict(state["run"])
    needed = sum(config.batch_size_of(step) for step in range(run.step, config.steps))
    place = loader.consumed_samples
    skipped = sum(max(0, last + 1 - max(first, place)) for first, last in config.skip)
    left = len(run.train) - place - skipped
    if needed > left:
        sys.exit(f"{config.steps} steps must have {needed} more samples, found {left}: give the blend a larger size")
    if loader.rank == 0:
        print(f"{run.folder}: from step {run.step + 1} to {config.steps}, see steps.jsonl there", flush=True)
    guarded = trained.model.guarded() if config.parallel == "ddp" else contextlib.nullcontext()
    with guarded:
        batches = iter(loader)
        while run.step < config.steps:
            losses = step_of(trained, batches, config.batch_size_of(run.step) // micro_batch)
            norm = trained.step()
            schedule.step()
            run.record(
                losses,
                grad_norm=norm,
                checkpoint_seconds=held_by(checkpointer, run.step),
                communication_seconds=trained.waits.take(),
                lr=schedule.get_last_lr()[0],
            )
            is_over = checkpointer.poll(run.step) or run.step == config.steps
            if config.eval_every and (run.step % config.eval_every == 0 or run.step == config.steps):
                evaluate(run, gpt)
            if is_over or run.step % config.checkpoint_every == 0:
                more = {"schedule": schedule.state_dict(), "run": run.state_dict()}
                checkpointer.save(run.step, {**trackbed.sharded_state(trained.model, trained.optimizer), **more})
            if is_over:
                break
    return run.step == config.steps


def step_of(trained: Replicas | Sharded, batches: Iterator[Any], num_micro: int) -> torch.Tensor:
    """Adds up the gradients of a step. Returns the loss of each sample of this rank."""
    losses = []
    for micro in range(num_micro):
        own = losses_of(trained.model, next(batches))
        with trained.micro_step(is_last=micro == num_micro - 1):
            (own.mean() / num_micro).backward()
        losses.append(own.detach())
    return torch.cat(losses)


def losses_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """`[B]` mean loss of each sample over the labels that the loss mask keeps, in nats."""
    logits = model(batch["tokens"], batch["position_ids"])
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return (losses * batch["loss_mask"]).sum(1) / batch["loss_mask"].sum(1).clamp(min=1)


def learning_rate_at(step: int, config: RunConfig) -> float:
    """Share of the learning rate: a linear warm-up, then a cosine down to a tenth."""
    warmup = config.optimizer.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, config.steps - warmup)))


@torch.no_grad()
def evaluate(run: trackbed.Run, model: GPT) -> None:
    """Records the mean loss of the valid split, and that of each dataset in it. Every rank reads a part."""
    valid = run.splits.valid
    loader = trackbed.BatchLoader(valid, batch_size=4, drop_last=False)
    sums = torch.zeros((2, len(getattr(valid, "datasets", [valid]))), dtype=torch.float64)
    for batch in loader:
        losses = losses_of(model, batch)
        ids = batch["dataset_id"].long() if "dataset_id" in batch else torch.zeros(len(losses), dtype=torch.int64)
        sums[0].index_add_(0, ids, losses.double())
        sums[1].index_add_(0, ids, torch.ones(len(ids), dtype=torch.float64))
    if dist.is_initialized():
        dist.all_reduce(sums)
    means = (sums[0] / sums[1]).tolist()
    run.event("evaluation", split="valid", loss=(sums[0].sum() / sums[1].sum()).item(), datasets=means)


def held_by(checkpointer: trackbed.Checkpointer, step: int) -> float:
    """Seconds for which the save behind a step has held training, if there was one."""
    return sum(record.blocked_seconds for record in checkpointer.history[-1:] if record.step == step)


def main() -> int:
    """Reads the file, and trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="RUN.toml", type=Path)
    path = parser.parse_args().config
    config = read_config(path)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    elif config.parallel == "fsdp2":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    folder = path.parent / config.run
    with (
        trackbed.open_run(folder, blend=path.parent / config.blend) as run,
        trackbed.Checkpointer(
            folder / "checkpoints", keep_last=config.keep_checkpoints, writer=config.writer
        ) as checkpointer,
    ):
        checkpointer.save_on_signal(signal.SIGTERM, signal.SIGUSR1)
        is_whole = train(config, run, checkpointer)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{folder}: {run.step} of {config.steps} steps{'' if is_whole else ', ended by a signal'}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
