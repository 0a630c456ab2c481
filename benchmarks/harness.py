"""Two ways of doing one thing, measured in turn in one process, so that a machine that slows down slows both."""

import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row of the table."""

    what: str
    unit: str
    ours: float
    """Median figure of Trackbed."""
    theirs: float
    """Median figure of megatron-core."""
    higher_is_better: bool
    moved_bytes: float = 0.0
    """Bytes that an item must move at least to or from memory; 0 where that says nothing."""

    @property
    def ratio(self) -> float:
        """How many times better Trackbed is."""
        return self.ours / self.theirs if self.higher_is_better else self.theirs / self.ours


def compare(
    what: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    items: int | None = None,
    rounds: int = 7,
    moved_bytes: float | None = None,
) -> Comparison:
    """Run both in turn, after one round that does not count.

    Args:
        what: what is measured, for the table.
        ours: one run of Trackbed.
        theirs: one run of megatron-core.
        items: things done in a run: the figure is then things per second, else milliseconds a run.
        rounds: runs of each that count.
        moved_bytes: bytes that an item must move at least; the figure is then nanoseconds an item.
    """
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for round_ in range(rounds + 1):
        order = [("ours", ours), ("theirs", theirs)]
        for name, run in order if round_ % 2 else reversed(order):
            started = time.perf_counter()
            run()
            if round_ > 0:
                seconds[name].append(time.perf_counter() - started)
    mine, other = statistics.median(seconds["ours"]), statistics.median(seconds["theirs"])
    if items is not None and moved_bytes is not None:
        each, other_each = mine / items * 1e9, other / items * 1e9
        return Comparison(what, "ns", each, other_each, higher_is_better=False, moved_bytes=moved_bytes)
    if items is None:
        return Comparison(what, "ms", mine * 1e3, other * 1e3, higher_is_better=False)
    return Comparison(what, "1/s", items / mine, items / other, higher_is_better=True)


def table(comparisons: Sequence[Comparison]) -> str:
    """The rows as a Markdown table."""
    lines = ["| | Trackbed | megatron-core 0.16.1 | times better |", "|---|---:|---:|---:|"]
    for row in comparisons:
        ours, theirs = (f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in (row.ours, row.theirs))
        lines.append(f"| {row.what} | {ours} {row.unit} | {theirs} {row.unit} | {row.ratio:.1f} |")
    return "\n".join(lines)


def kernel_table(comparisons: Sequence[Comparison], bandwidth: float) -> str:
    """Rows of kernels, with the part of the memory's bandwidth that what they must move takes."""
    lines = [
        f"| | Trackbed | megatron-core, NumPy | times faster | GB/s it must move, of {bandwidth:.0f} |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in comparisons:
        moved = row.moved_bytes / row.ours
        lines.append(f"| {row.what} | {row.ours:.1f} ns | {row.theirs:.1f} ns | {row.ratio:.1f} | {moved:.2f} |")
    return "\n".join(lines)


def copies_of(path: Path, count: int) -> tuple[Path, ...]:
    """The file and copies of it beside it, made once: `preprocess` reads one file once, however often it is given."""
    copies = [path, *(path.with_name(f"{path.stem}-copy-{number}{path.suffix}") for number in range(1, count))]
    for copy in copies:
        if not copy.exists():
            shutil.copyfile(path, copy)
    return tuple(copies)


def memory_gigabytes_per_second() -> float:
    """What one thread copies, reading and writing counted."""
    source, target = np.ones(1 << 26), np.zeros(1 << 26)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / statistics.median(seconds) / 1e9


def machine() -> str:
    """The machine in one line."""
    info = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{models[0] if models else platform.machine()}, {cores} cores, {memory:.0f} GiB, {platform.system()}"


def run_on_ranks(module: str, size: int, folder: str | None) -> int:
    """Runs a benchmark again on several ranks, with the arguments of this process.

    Each finds a folder, which is removed afterwards, under `TRACKBED_BENCH_FOLDER` in its environment.

    Args:
        module: name of the benchmark.
        size: number of ranks.
        folder: where the folder is made; None for the system's place.

    Returns:
        The highest exit status.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TRACKBED_BENCH_FOLDER": place,
        }
        free.close()
        command = [sys.executable, "-W", "ignore", "-m", module, *sys.argv[1:]]
        ranks = [subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank)}) for rank in range(size)]
        return max(rank.wait() for rank in ranks)
