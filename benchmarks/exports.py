"""`python -m benchmarks.exports`: a model of 4 GB as files of safetensors, against `cp` of the checkpoint.

Both end when the files are on the disk. They run in turn, and the checkpoint is in the page cache. Trackbed's time is
that of the export alone; `trackbed ckpt export` begins with the import of torch. 15 GB of disk.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import machine
from trackbed import sharded_state
from trackbed.checkpoint import save
from trackbed.comm import SOLO

ROUNDS = 5
_EXPORT = """
import sys, time
from pathlib import Path
from trackbed.checkpoint.export import export_model
def most_kilobytes():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before, start = most_kilobytes(), time.perf_counter()
export_model(sys.argv[1], sys.argv[2])
print(time.perf_counter() - start, most_kilobytes() - before)
"""


def make_checkpoint(folder: Path) -> int:
    """Saves a model. Returns the bytes of its parameters."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4096, 8192, bias=False) for _ in range(32)))
    save(sharded_state(model), folder, group=SOLO)
    return sum(weight.nbytes for weight in model.parameters())


def export(checkpoint: Path, target: Path) -> tuple[float, float]:
    """Exports in a process of its own. Returns the seconds, and the MiB by which its memory grew."""
    command = [sys.executable, "-c", _EXPORT, str(checkpoint), str(target)]
    seconds, kilobytes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(seconds), float(kilobytes) / 1024


def copy(checkpoint: Path, target: Path) -> float:
    """Copies with `cp`, and has the disk take the files. Returns the seconds."""
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(checkpoint), str(target)], check=True)
    subprocess.run(["sync", *map(str, target.iterdir())], check=True)
    return time.perf_counter() - start


def main() -> int:
    """Prints the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", help="folder on the disk that is measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        num_bytes = make_checkpoint(folder / "checkpoint")
        ours: list[float] = []
        theirs: list[float] = []
        memory: list[float] = []
        for _ in range(options.rounds + 1):  # the first round fills the page cache
            seconds, grown = export(folder / "checkpoint", folder / "exported")
            ours.append(seconds)
            memory.append(grown)
            shutil.rmtree(folder / "exported")
            theirs.append(copy(folder / "checkpoint", folder / "copied"))
            shutil.rmtree(folder / "copied")
    print(f"{machine()}, torch {torch.__version__}, {num_bytes / 1e9:.2f} GB, {options.rounds} rounds\n")
    print("| | median s (min-max) | times Trackbed's | memory MiB |\n|---|---:|---:|---:|")
    median = statistics.median(ours[1:])
    for what, found, most in (("Trackbed's export", ours[1:], f"{max(memory):.0f}"), ("cp, sync", theirs[1:], "")):
        middle = statistics.median(found)
        print(f"| {what} | {middle:.2f} ({min(found):.2f}-{max(found):.2f}) | {middle / median:.2f} | {most} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
