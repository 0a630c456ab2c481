"""The whole way on text that every machine with Python has: from raw text to a model that was stopped and resumed.

    python examples/demo.py --output demo-out

Trains a tokenizer, writes three indexed files, blends them, trains a small GPT on two ranks with a sharded optimizer,
trains it again and stops half-way, resumes on one rank with twice as many micro-batches, and compares the losses.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpora
from picture import draw
from rich.console import Console
from rich.table import Table

from trackbed.preprocess import (
    PreprocessConfig,
    TrainingConfig,
    open_tokenizer,
    output_prefix,
    preprocess,
    train_tokenizer,
)

WEIGHTS = {"sources": 0.6, "topics": 0.15, "papers": 0.25}
STEPS = 80
BATCH_SIZE = 8
console = Console()


def timed(what: str, work: Callable[[], Any]) -> Any:
    """Do it, saying what and for how long."""
    started = time.perf_counter()
    with console.status(what):
        found = work()
    console.print(f"{what}: [bold]{time.perf_counter() - started:.1f} s[/]")
    return found


def make_tokens(folder: Path, texts: dict[str, Path]) -> tuple[Path, dict[str, str], int]:
    """A tokenizer of the corpora, a pair of indexed files for each, and how many tokens they have."""
    tokenizer = folder / "tokenizer.json"
    config = TrainingConfig(inputs=tuple(texts.values()), vocab_size=4096)
    timed("a BPE tokenizer of 4,096 tokens trained", lambda: train_tokenizer(config, tokenizer))
    prefixes, tokens = {}, 0
    for name, text in texts.items():
        output = str(folder / name)
        job = PreprocessConfig(inputs=(text,), output=output, append_eod=True)
        report = timed(f"{name} tokenised", lambda job=job: preprocess(job, open_tokenizer(str(tokenizer))))
        prefixes[name] = output_prefix(output, "text")
        tokens += sum(found.tokens for found in report.outputs)
    return tokenizer, prefixes, tokens


def blend_text(tokenizer: Path, prefixes: dict[str, str]) -> str:
    """The blend file of the training. Paths are relative to its folder."""
    datasets = "".join(
        f'\n[[dataset]]\npath = "{Path(prefix).name}"\nweight = {WEIGHTS[name]}\n' for name, prefix in prefixes.items()
    )
    return f"""version = 1
sequence_length = 128
tokenizer = "{tokenizer.name}"
order = "megatron"
cache = "cache"
split = "92,8"
size = {{train = {STEPS * BATCH_SIZE}, valid = 64}}
{datasets}"""


def run(blend: Path, losses: Path, *options: str, ranks: int) -> dict[str, Any]:
    """`train.py` in processes of its own, under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    sizes = ["--steps", str(STEPS), "--batch-size", str(BATCH_SIZE)]
    program = str(Path(__file__).with_name("train.py"))
    command = [*launcher, program, str(blend), *sizes, "--losses", str(losses), *options]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(losses.read_text())
    return found


def compare(whole: dict[str, Any], parts: list[dict[str, Any]]) -> bool:
    """Whether the losses before and after the stop are those of the uninterrupted run, to the last bit."""
    joined = {step: loss for part in parts for step, loss in part["losses"].items()}
    return joined == whole["losses"] and parts[-1]["valid_loss"] == whole["valid_loss"]


def main() -> int:
    """Run the demo; 0 if the resumed run equals the uninterrupted one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo-out"), help="folder for everything that is written")
    parser.add_argument("--setup-seconds", type=float, help="how long the set-up before this took, to be printed")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)
    started = time.perf_counter()

    texts = timed("three corpora collected", lambda: corpora.write(folder))
    tokenizer, prefixes, tokens = make_tokens(folder, texts)
    blend = folder / "blend.toml"
    blend.write_text(blend_text(tokenizer, prefixes))
    half, state = str(STEPS // 2), folder / "checkpoint"
    shutil.rmtree(state, ignore_errors=True)
    whole = timed(f"a GPT trained for {STEPS} steps on 2 ranks", lambda: run(blend, folder / "whole.json", ranks=2))
    before = timed(
        f"trained again, and stopped after {half}",
        lambda: run(blend, folder / "before.json", "--stop-after", half, "--save", str(state), ranks=2),
    )
    after = timed(
        "resumed on 1 rank, and trained to the end",
        lambda: run(blend, folder / "after.json", "--resume", str(state), ranks=1),
    )
    identical = compare(whole, [before, after])
    draw(folder / "demo.png", whole, [before, after], list(prefixes), list(WEIGHTS.values()))

    losses = list(whole["losses"].values())
    summary = {
        "tokens": tokens,
        "parameters": whole["parameters"],
        "data_start_seconds": {"cold": whole["data_seconds"], "warm": after["data_seconds"]},
        "samples_per_second": whole["samples_per_second"],
        "loss": {"first": losses[0], "last": losses[-1], "valid": whole["valid_loss"]},
        "resume": "identical" if identical else "different",
        "setup_seconds": arguments.setup_seconds,
        "job_seconds": time.perf_counter() - started,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    show(summary, folder)
    return 0 if identical else 1


def show(summary: dict[str, Any], folder: Path) -> None:
    """The summary on one screen."""
    start, loss = summary["data_start_seconds"], summary["loss"]
    table = Table(title="From text to a resumed training run", show_header=False, title_justify="left")
    table.add_row("tokens", f"{summary['tokens']:,} from {len(WEIGHTS)} corpora")
    table.add_row("model", f"{summary['parameters']:,} parameters")
    table.add_row("data layer ready", f"{start['cold'] * 1e3:.0f} ms cold, {start['warm'] * 1e3:.0f} ms from the cache")
    table.add_row("training", f"{summary['samples_per_second']:.0f} samples/s")
    table.add_row("loss", f"{loss['first']:.3f} to {loss['last']:.3f}, validation {loss['valid']:.3f}")
    table.add_row("resume", summary["resume"])
    if summary["setup_seconds"] is not None:
        table.add_row("set-up", f"{summary['setup_seconds']:.0f} s")
    table.add_row("this job", f"{summary['job_seconds']:.0f} s")
    console.print(table)
    console.print(f"picture: {folder / 'demo.png'}   figures: {folder / 'summary.json'}")


if __name__ == "__main__":
    sys.exit(main())
