"""The whole way on text that every machine with Python has: from raw text to runs that were killed and went on.

    python examples/demo.py --output demo-out

Trains a tokenizer, writes three indexed files, blends them, and trains a small GPT on two ranks with a sharded
optimizer (`pretrain_gpt.py`), three times: without a stop; with a rank that is killed at a random step, resumed; and
killed twice, resumed on one rank and on two. Then it compares what each step was fed, and the losses.
"""

import argparse
import contextlib
import json
import os
import random
import signal
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

from trackbed.ledger import RunRecord, read_run
from trackbed.preprocess import (
    PreprocessConfig,
    TrainingConfig,
    open_tokenizer,
    output_prefix,
    preprocess,
    train_tokenizer,
)

WEIGHTS = {"sources": 0.6, "topics": 0.15, "papers": 0.25}
STEPS = 60
SAVED_EVERY = 10
BATCH_SIZE = 8
MOST_DIFFERENCE = 1e-3
"""Largest difference of losses on other numbers of ranks, which add in another order."""
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
order = "instant"
split = "92,8"
size = {{train = {STEPS * BATCH_SIZE}, valid = 64}}
{datasets}"""


def write_config(folder: Path, name: str) -> Path:
    """The file of a run, which begins anew."""
    path = folder / f"{name}.toml"
    path.write_text(
        f'run = "{name}-{os.getpid()}"\nblend = "blend.toml"\nsteps = {STEPS}\nglobal_batch_size = {BATCH_SIZE}\n'
        f"micro_batch_size = 4\ncheckpoint_every = {SAVED_EVERY}\nkeep_checkpoints = 2\neval_every = {STEPS}\n"
    )
    return path


def run(config: Path, ranks: int, kill_behind: int | None = None) -> Path:
    """Trains under torchrun, to the end, or until a rank is killed behind a step. Returns the folder of the run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(Path(__file__).with_name("pretrain_gpt.py")), str(config)]
    folder = config.parent / config.read_text().split('"')[1]
    with config.with_suffix(".log").open("a") as log:
        job = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
        while kill_behind is not None and job.poll() is None:
            if last_step(folder) >= kill_behind:
                os.kill(random.choice(processes_of(job.pid)), signal.SIGKILL)
                break
            time.sleep(0.02)
        status = job.wait()
    if kill_behind is None and status:
        sys.exit(f"{' '.join(command)} has failed, see {config.with_suffix('.log')}")
    return folder


def last_step(folder: Path) -> int:
    """The last step that is recorded."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(json.loads((folder / "steps.jsonl").read_text().splitlines()[-1])["step"])
    return 0


def processes_of(launcher: int) -> list[int]:
    """The ranks that a launcher has started."""
    return [int(word) for word in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def compare(one: RunRecord, other: RunRecord) -> tuple[bool, bool, float]:
    """Compares two runs: if their batches are the same, if their losses are, and the largest difference of losses."""
    hashes = [[step["batch_hash"] for step in record.steps] for record in (one, other)]
    losses = [[step["loss"] for step in record.steps] for record in (one, other)]
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return hashes[0] == hashes[1], losses[0] == losses[1], difference


def main() -> int:
    """Run the demo; 0 if the resumed runs equal the uninterrupted one."""
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
    (folder / "blend.toml").write_text(blend_text(tokenizer, prefixes))
    whole, killed, moved = (write_config(folder, name) for name in ("whole", "killed", "moved"))
    first, second, third = random.randrange(12, STEPS - 5), random.randrange(12, 25), random.randrange(32, STEPS - 5)
    folders = [timed(f"a GPT trained for {STEPS} steps on 2 ranks", lambda: run(whole, 2))]
    timed(f"trained again, a rank killed behind step {first}", lambda: run(killed, 2, first))
    folders.append(timed("resumed on 2 ranks", lambda: run(killed, 2)))
    timed(f"once more, killed behind step {second}", lambda: run(moved, 2, second))
    timed(f"resumed on 1 rank, killed behind step {third}", lambda: run(moved, 1, third))
    folders.append(timed("resumed on 2 ranks", lambda: run(moved, 2)))
    records = [read_run(one) for one in folders]
    is_same, has_same_losses, _ = compare(records[0], records[1])
    is_same_elsewhere, _, difference = compare(records[0], records[2])
    draw(folder / "demo.png", records, list(WEIGHTS.values()), list(prefixes))

    losses = [step["loss"] for step in records[0].steps]
    valid = next(event["loss"] for event in reversed(records[0].events) if event["event"] == "evaluation")
    summary = {
        "tokens": tokens,
        "loss": {"first": losses[0], "last": losses[-1], "valid": valid},
        "resume": "identical" if is_same and has_same_losses else "different",
        "elastic": {
            "batches": "identical" if is_same_elsewhere else "different",
            "largest_loss_difference": difference,
        },
        "setup_seconds": arguments.setup_seconds,
        "job_seconds": time.perf_counter() - started,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    show(summary, folder)
    return 0 if is_same and has_same_losses and is_same_elsewhere and difference <= MOST_DIFFERENCE else 1


def show(summary: dict[str, Any], folder: Path) -> None:
    """The summary on one screen."""
    loss, elastic = summary["loss"], summary["elastic"]
    table = Table(title="From text to runs that were killed and went on", show_header=False, title_justify="left")
    table.add_row("tokens", f"{summary['tokens']:,} from {len(WEIGHTS)} corpora")
    table.add_row("loss", f"{loss['first']:.3f} to {loss['last']:.3f}, validation {loss['valid']:.3f}")
    table.add_row("killed, resumed on 2 ranks", f"batches and losses {summary['resume']}")
    words = f"batches {elastic['batches']}, losses within {elastic['largest_loss_difference']:.1e}"
    table.add_row("killed, resumed on 1, then on 2", words)
    if summary["setup_seconds"] is not None:
        table.add_row("set-up", f"{summary['setup_seconds']:.0f} s")
    table.add_row("this job", f"{summary['job_seconds']:.0f} s")
    console.print(table)
    console.print(f"picture: {folder / 'demo.png'}   figures: {folder / 'summary.json'}")


if __name__ == "__main__":
    sys.exit(main())
