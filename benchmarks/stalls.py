"""`python -m benchmarks.stalls`: how long saves in the background keep training waiting, and how they slow it down.

A state of 2 GB, DTensors of which each rank has its rows, is saved again and again, while each rank makes steps:
products of matrices on one thread. All contenders run in the same processes, in turn.

- blocked: time until the call returns; the first one apart, after `prepare` where there is such a function.
- steps: time of a step while saves run, against the time without.
- whole: time from the call to the end of the save, where the program waits for it, against a save in the foreground.
- memory: what the rank and its child processes take during the first save, beside the bytes that the rank writes.
"""

import argparse
import os
import shutil
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.checkpoints import State
from benchmarks.harness import machine, run_on_ranks
from trackbed import Checkpointer, save

ROUNDS = 5
STEPS = 500
IDLE_STEPS = 200


@dataclass(slots=True)
class Contender:
    """A way to save in the background."""

    begin: Callable[[int], object]
    """Begins the save of a step."""
    is_over: Callable[[], bool]
    end: Callable[[], object]
    """Waits for the end of the save."""
    prepare: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None
    memory: int = 0
    """Most bytes that it takes during a save, beside those that the rank has."""
    blocked: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)


class TorchSaves:
    """Saves of `dcp.async_save`, on a thread."""

    def __init__(self, state: dict[str, Any], folder: Path, *, keeps_memory: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._state, self._folder = state, folder
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options) if keeps_memory else None
        self._group = dist.new_group(backend="gloo")
        self._future: Any = None

    def begin(self, step: int) -> None:
        """Begins a save."""
        self._future = dcp.async_save(
            self._state,
            checkpoint_id=str(self._folder / str(step)),
            process_group=self._group,
            async_stager=self._stager,
        )

    def is_over(self) -> bool:
        """True once the files are written."""
        return bool(self._future.done())

    def end(self) -> None:
        """Waits for the end."""
        self._future.result()


def contenders(state: State, folder: Path) -> dict[str, Contender]:
    """Ways to save the state."""
    tensors = state.torch_state()
    found = {}
    for writer, name in (("thread", "Trackbed"), ("process", "Trackbed, process")):
        found[name] = trackbed_contender(tensors, folder / name.replace(", ", "-"), writer)
    for name, keeps_memory in (("DCP, thread", False), ("DCP, thread, its memory kept", True)):
        saves = TorchSaves(tensors, folder / name.replace(",", ""), keeps_memory=keeps_memory)
        found[name] = Contender(saves.begin, saves.is_over, saves.end)
    return found


def trackbed_contender(tensors: dict[str, Any], folder: Path, writer: Any) -> Contender:
    """Saves of a `Checkpointer`, which is made when the first one begins."""
    made: list[Checkpointer] = []

    def prepare() -> None:
        made.append(Checkpointer(folder, keep_last=1, writer=writer))
        made[0].prepare(tensors)

    def is_over() -> bool:
        made[0].poll()
        return made[0].history[-1].total_seconds is not None

    def end() -> None:
        made[0].wait()

    def close() -> None:
        made[0].close()

    return Contender(lambda step: made[0].save(step, tensors), is_over, end, prepare, close)


def training_step(matrices: list[torch.Tensor]) -> float:
    """Seconds of a step of some 10 ms."""
    start = time.perf_counter()
    torch.mm(matrices[0], matrices[1], out=matrices[2])
    return time.perf_counter() - start


def copy_seconds(state: State, rounds: int) -> float:
    """Median time of a bare copy of what a rank has, into memory that is there, on all ranks at once: the slowest."""
    source = list(state.tensors.values())
    target = [torch.empty_like(tensor) for tensor in source]
    seconds = []
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        for one, other in zip(target, source, strict=True):
            one.copy_(other)
        seconds.append(time.perf_counter() - start)
    found = torch.tensor(statistics.median(seconds[1:]))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


class Memory:
    """Highest memory of this process and its children that no file has, while it is watched."""

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._is_over.wait(0.02):
            self.most = max(self.most, memory())

    def end(self) -> int:
        """Ends the watch. Returns the bytes."""
        self._is_over.set()
        self._thread.join()
        return self.most


def memory() -> int:
    """Bytes of this process and its children that no file has. Memory that processes share counts in each."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    return sum(memory_of(pid) for pid in (str(own), *children))


def memory_of(pid: str) -> int:
    """Anonymous and shared memory of a process, in bytes; of a child, the anonymous memory alone."""
    kinds = ("RssAnon:", "RssShmem:") if pid == str(os.getpid()) else ("RssAnon:",)
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(kinds))


def measure(folder: Path, options: argparse.Namespace) -> None:
    """Prints the tables, on rank 0."""
    state = State.make("divided")
    copy = copy_seconds(state, options.rounds)
    ways = contenders(state, folder)
    foreground = []
    for _ in range(options.rounds):
        dist.barrier()
        start = time.perf_counter()
        save(state.torch_state(), folder / "foreground")
        foreground.append(time.perf_counter() - start)
    for way in ways.values():
        before, watch = memory(), Memory()
        way.prepare()
        time.sleep(3)  # a process needs some time to start
        measure_blocked(way, 0, folder)
        way.memory = watch.end() - before
    names = list(ways)
    for number in range(1, options.rounds + 1):
        for name in names if number % 2 else reversed(names):
            measure_blocked(ways[name], number, folder)
    side = 600
    matrices = [torch.rand(side, side) for _ in range(3)]
    number = options.rounds
    for way in ways.values():
        dist.barrier()
        way.idle = [training_step(matrices) for _ in range(IDLE_STEPS)]
        fewest = torch.zeros(1)
        while fewest < options.steps:
            number += 1
            way.begin(number)
            while not way.is_over():
                way.steps.append(training_step(matrices))
            way.end()
            fewest = torch.tensor([float(len(way.steps))])
            dist.all_reduce(fewest, dist.ReduceOp.MIN)
            clear(folder)
    poll = polled(ways["Trackbed"], number + 1)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        gathered, {name: (way.blocked, way.whole, way.steps, way.idle, way.memory) for name, way in ways.items()}
    )
    for way in ways.values():
        way.close()
    if dist.get_rank() == 0:
        report(gathered, copy, statistics.median(foreground), poll, state)


def measure_blocked(way: Contender, number: int, folder: Path) -> None:
    """Measures how long a save keeps the program waiting, and takes in all."""
    dist.barrier()
    start = time.perf_counter()
    way.begin(number)
    way.blocked.append(time.perf_counter() - start)
    way.end()
    way.whole.append(time.perf_counter() - start)
    clear(folder)


def polled(way: Contender, step: int) -> float:
    """Median time of a poll while a save is in flight."""
    way.begin(step)
    seconds = []
    for _ in range(200):
        start = time.perf_counter()
        way.is_over()
        seconds.append(time.perf_counter() - start)
    way.end()
    return statistics.median(seconds)


def report(gathered: list[Any], copy: float, foreground: float, poll: float, state: State) -> None:
    """Prints the tables: of the ranks, the slowest."""
    own = sum(tensor.nbytes for tensor in state.tensors.values()) / 1e9
    print(
        f"\n{len(gathered)} ranks, {own:.2f} GB each; bare copy {copy:.3f} s, save in the foreground {foreground:.2f} s"
    )
    print(f"a poll takes {poll * 1e6:.1f} us\n")
    print(
        "| | blocked first s | blocked s | times the copy | whole s | times the foreground | MiB beside what it writes "
        "| step ms | p99 ms | idle ms | p99 ms | p99 times |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in gathered[0]:
        blocked, whole, steps, idle, taken = zip(*(found[name] for found in gathered), strict=True)
        first = max(one[0] for one in blocked)
        later = max(statistics.median(one[1:]) for one in blocked)
        total = max(statistics.median(one[1:]) for one in whole)
        busy = [max(statistics.median(one) for one in steps), max(high(one) for one in steps)]
        free = [max(statistics.median(one) for one in idle), max(high(one) for one in idle)]
        numbers = " | ".join(f"{1e3 * one:.2f}" for one in (*busy, *free))
        print(
            f"| {name} | {first:.3f} | {later:.3f} | {later / copy:.2f} | {total:.2f} | {total / foreground:.2f} "
            f"| {(max(taken) - 1e9 * own) / 2**20:.0f} | {numbers} "
            f"| {busy[1] / free[1]:.2f} |"
        )


def high(seconds: list[float]) -> float:
    """99th percentile."""
    return sorted(seconds)[int(0.99 * len(seconds))]


def clear(folder: Path) -> None:
    """Removes the checkpoints of torch, which would fill the disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in folder.glob("DCP*/*"):
            shutil.rmtree(path)
    dist.barrier()


def main() -> int:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--folder", help="folder on the disk that is measured")
    options = parser.parse_args()
    if "RANK" in os.environ:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measure(Path(os.environ["TRACKBED_BENCH_FOLDER"]), options)
        sys.stdout.flush()
        os._exit(0)  # peers leave threads and processes that would end the process with an error
    print(f"{machine()}, torch {torch.__version__}, ranks of one thread")
    return max(run_on_ranks("benchmarks.stalls", size, options.folder) for size in options.ranks)


if __name__ == "__main__":
    sys.exit(main())
