"""`python -m benchmarks.checkpoints`: saves and loads of 2 GB and of 20,000 small tensors, against their peers.

All contenders run in the same processes, in turn, so that a machine that slows down slows all of them. A save ends when
the files are on the disk. CPU time is that of all ranks and of the processes that they start.

    python -m benchmarks.checkpoints                      all of it: half an hour, and 10 GB of disk
    python -m benchmarks.checkpoints --ranks 2 --save     only the saves of two ranks; likewise `--load`
    python -m benchmarks.checkpoints --states small       only one of the states, or some

States: "replicated" on all ranks, "sharded" by rows, and "divided", the same rows as DTensors, as FSDP2 has them, of
2 GB each; "small", 20,000 tensors, and "divided-small", as many DTensors.
"""

import argparse
import contextlib
import functools
import mmap
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.harness import machine, run_on_ranks
from trackbed.checkpoint import ShardedTensor, load, save

WIDTH, LAYERS, VOCABULARY = 1280, 24, 22000
NUM_SMALL = 20_000
STATES = ["replicated", "sharded", "divided", "small", "divided-small"]
ROUNDS = 5
BLOCK = 16 << 20
Shapes = dict[str, tuple[int, ...]]


def gpt_shapes(width: int = WIDTH) -> Shapes:
    """Shapes of 293 tensors, 2.0 GB in fp32 at the full width."""
    layer = {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "qkv.weight": (3 * width, width),
        "qkv.bias": (3 * width,),
        "proj.weight": (width, width),
        "proj.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "fc1.weight": (4 * width, width),
        "fc1.bias": (4 * width,),
        "fc2.weight": (width, 4 * width),
        "fc2.bias": (width,),
    }
    shapes: Shapes = {f"layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    ends: Shapes = {
        "embedding": (VOCABULARY, width),
        "positions": (1024, width),
        "norm.weight": (width,),
        "norm.bias": (width,),
        "head.bias": (VOCABULARY,),
    }
    return shapes | ends


def small_shapes() -> Shapes:
    """Shapes of 20,000 tensors of 1 to 64 KiB, whose rows 4 ranks can divide evenly."""
    draw = random.Random(1)
    return {f"small.{number}": (draw.randrange(64, 4096) // 4 * 4, 4) for number in range(NUM_SMALL)}


@dataclass(slots=True)
class State:
    """Tensors of a rank, for each contender in its own form."""

    tensors: dict[str, torch.Tensor]
    """Tensors of this rank: whole ones, or rows."""
    shapes: Shapes
    is_sharded: bool
    is_divided: bool
    """True if Trackbed gets DTensors."""

    @classmethod
    def make(cls, kind: str) -> "State":
        """Creates one of the states."""
        rank, size = dist.get_rank(), dist.get_world_size()
        is_divided = kind.startswith("divided")
        is_sharded = kind == "sharded" or is_divided
        shapes = small_shapes() if kind.endswith("small") else gpt_shapes(WIDTH if size <= 2 else 832)
        tensors = {}
        for number, (key, shape) in enumerate(shapes.items()):
            whole = torch.arange(number, number + torch.Size(shape).numel(), dtype=torch.float32).view(shape)
            tensors[key] = (
                whole[rank * shape[0] // size : (rank + 1) * shape[0] // size].clone() if is_sharded else whole
            )
        return cls(tensors, shapes, is_sharded, is_divided)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole state."""
        return 4 * sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def sharded_state(self, kind: Any) -> dict[str, Any]:
        """State dictionary with entries of a class."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if self.is_sharded:
            return {key: kind.from_rank_offsets(key, tensor, (0, rank, size)) for key, tensor in self.tensors.items()}
        return {key: kind.from_rank_offsets(key, tensor, replica_id=rank) for key, tensor in self.tensors.items()}

    def torch_state(self) -> dict[str, Any]:
        """State dictionary for torch's own checkpoints."""
        if not self.is_sharded:
            return dict(self.tensors)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return {
            key: DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False) for key, tensor in self.tensors.items()
        }

    def clear(self) -> None:
        """Sets all tensors to zero."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def check(self) -> None:
        """Raises ValueError if a tensor has other numbers than `make` gave it."""
        rank, size = dist.get_rank(), dist.get_world_size()
        for number, (key, tensor) in enumerate(self.tensors.items()):
            shape = self.shapes[key]
            first = number + (rank * shape[0] // size * torch.Size(shape[1:]).numel() if self.is_sharded else 0)
            if not torch.equal(tensor.view(-1), torch.arange(first, first + tensor.numel(), dtype=torch.float32)):
                raise ValueError(f"{key}: must have been loaded as it was saved, but was not")


@dataclass(slots=True)
class Times:
    """Measured runs of one contender."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


@functools.cache
def megatron_modules() -> Any:
    """Megatron Core's checkpoint package, with its CUDA calls answered by the CPU inside the second result."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/conformance/megatron_lm"))
    import cuda_shim

    cuda_shim.MODE.__exit__(None, None, None)
    with cuda_shim.MODE:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.strategies import fully_parallel
        from megatron.core.dist_checkpointing.strategies import torch as strategies
    return dist_checkpointing, fully_parallel, strategies, cuda_shim.MODE


def savers(state: State) -> dict[str, Callable[[Path], None]]:
    """Contenders of a save."""
    package, wrappers, strategies, shim = megatron_modules()
    ours, theirs, plain = (
        state.sharded_state(ShardedTensor),
        state.sharded_state(package.ShardedTensor),
        state.torch_state(),
    )

    def megatron(folder: Path, *, is_wrapped: bool) -> None:
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        with shim:
            strategy = strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
            if is_wrapped:
                strategy = wrappers.FullyParallelSaveStrategyWrapper(strategy)
            entries = dict(theirs) if not is_wrapped else state.sharded_state(package.ShardedTensor)
            package.save(entries, str(folder), strategy)

    torchs: dict[str, Callable[[Path], None]] = {
        "DCP": lambda folder: dcp.save(plain, checkpoint_id=str(folder)) and None,
        "raw O_DIRECT": lambda folder: write_raw(folder, state.num_bytes // dist.get_world_size()),
    }
    if state.is_divided:
        return {"Trackbed": lambda folder: save(plain, folder), **torchs}
    return {
        "Trackbed": lambda folder: save(ours, folder),
        "Trackbed, direct=False": lambda folder: save(ours, folder, direct=False),
        **torchs,
        "megatron-core": lambda folder: megatron(folder, is_wrapped=False),
        "megatron-core, FullyParallelSave": lambda folder: megatron(folder, is_wrapped=True),
    }


def write_raw(folder: Path, num_bytes: int) -> None:
    """Writes bytes of one buffer past the page cache: the limit of the disk."""
    folder.mkdir(exist_ok=True)
    with mmap.mmap(-1, BLOCK) as buffer:
        buffer.write(os.urandom(1 << 20) * (BLOCK >> 20))
        descriptor = os.open(folder / str(dist.get_rank()), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            for start in range(0, num_bytes, BLOCK):
                os.pwrite(descriptor, buffer, start)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
    dist.barrier()


def loaders(state: State, folder: Path) -> dict[str, Callable[[], None]]:
    """Contenders of a load, each of what it has saved."""
    package, wrappers, strategies, shim = megatron_modules()
    ours, plain = state.sharded_state(ShardedTensor), state.torch_state()
    saving = savers(state)
    for name, contender in (("ours", "Trackbed"), ("dcp", "DCP"), ("megatron", "megatron-core")):
        if contender in saving:
            saving[contender](folder / name)

    def megatron(*, is_wrapped: bool) -> None:
        with shim:
            strategy = strategies.TorchDistLoadShardedStrategy()
            if is_wrapped:
                strategy = wrappers.FullyParallelLoadStrategyWrapper(strategy)
            loaded = package.load(state.sharded_state(package.ShardedTensor), str(folder / "megatron"), strategy)
        for key, tensor in state.tensors.items():
            if loaded[key].data_ptr() != tensor.data_ptr():
                tensor.copy_(loaded[key])

    asked = plain if state.is_divided else ours
    found = {
        "Trackbed": lambda: load(asked, folder / "ours") and None,
        "DCP": lambda: dcp.load(plain, checkpoint_id=str(folder / "dcp")),
    }
    if state.is_divided:
        return found
    found["megatron-core"] = lambda: megatron(is_wrapped=False)
    if dist.get_world_size() > 1 and not state.is_sharded:
        found["megatron-core, FullyParallelLoad"] = lambda: megatron(is_wrapped=True)
    return found


def measured(run: Callable[[], None], times: Times | None) -> None:
    """Runs a contender on all ranks at once, and adds what it took."""
    dist.barrier()
    cpu, rss = sum(os.times()[:4]), anonymous_bytes()
    with peak_memory() as peak:
        started = time.perf_counter()
        run()
        dist.barrier()
        wall = time.perf_counter() - started
    found = torch.tensor([sum(os.times()[:4]) - cpu], dtype=torch.float64)
    dist.all_reduce(found)
    memory = torch.tensor([float(peak() - rss)])
    dist.all_reduce(memory, op=dist.ReduceOp.MAX)
    if times is not None:
        times.wall.append(wall)
        times.cpu.append(float(found))
        times.memory.append(float(memory))


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """In the block, anonymous memory is read every 20 ms; yields the highest figure."""
    found, is_over = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            found.append(anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: max(found)
    finally:
        is_over.set()
        thread.join()


def save_table(kind: str, folder: Path, rounds: int) -> Iterator[str]:
    """Measures the contenders of a save."""
    state = State.make(kind)
    contenders = savers(state)
    times = {name: Times() for name in contenders}
    for number in range(rounds + 1):
        for name in shuffled(contenders, number):
            target = folder / f"{number}-{list(contenders).index(name)}"
            measured(lambda name=name, target=target: contenders[name](target), times[name] if number else None)
            if dist.get_rank() == 0:
                shutil.rmtree(target)
                os.sync()
    yield from rows(f"Save, {kind}, {state.num_bytes / 1e9:.2f} GB", times)


def load_table(kind: str, folder: Path, rounds: int) -> Iterator[str]:
    """Measures the contenders of a load."""
    state = State.make(kind)
    contenders = loaders(state, folder)
    for where in ("warm", "cold"):
        names = [name for name in contenders if where == "warm" or name in ("Trackbed", "DCP")]
        times = {name: Times() for name in names}
        for number in range(rounds + 1):
            for name in shuffled(names, number):
                state.clear()
                if where == "cold":
                    drop_pages(folder)
                measured(contenders[name], times[name] if number else None)
                state.check()
        yield from rows(f"Load, {kind}, {where}, {state.num_bytes / 1e9:.2f} GB", times)


def shuffled(names: Any, seed: int) -> list[str]:
    """The names in an order that depends on the round, the same on every rank."""
    found = list(names)
    random.Random(seed).shuffle(found)
    return found


def drop_pages(folder: Path) -> None:
    """Removes the files of a folder from the page cache."""
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    dist.barrier()


def rows(title: str, times: dict[str, Times]) -> Iterator[str]:
    """A Markdown table."""
    ranks = "1 rank" if dist.get_world_size() == 1 else f"{dist.get_world_size()} ranks"
    yield f"\n{title}, {ranks}, {len(times['Trackbed'].wall)} rounds\n"
    yield "| | median ms (min-max) | times Trackbed's | CPU ms | times Trackbed's | memory MiB |"
    yield "|---|---:|---:|---:|---:|---:|"
    wall, cpu = (statistics.median(found) for found in (times["Trackbed"].wall, times["Trackbed"].cpu))
    for name, found in times.items():
        median, low, high = statistics.median(found.wall), min(found.wall), max(found.wall)
        own = statistics.median(found.cpu)
        memory = max(found.memory) / 2**20
        yield (
            f"| {name} | {1e3 * median:,.0f} ({1e3 * low:,.0f}-{1e3 * high:,.0f}) | {median / wall:.2f} "
            f"| {1e3 * own:,.0f} | {own / cpu:.2f} | {memory:.0f} |"
        )


def run_rank(options: argparse.Namespace) -> None:
    """Runs the tables on one rank; rank 0 prints them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    base = Path(os.environ["TRACKBED_BENCH_FOLDER"])
    for action, table in (("save", save_table), ("load", load_table)):
        if not getattr(options, action):
            continue
        for kind in options.states:
            folder = base / f"{action}-{kind}"
            if dist.get_rank() == 0:
                folder.mkdir()
            dist.barrier()
            for line in table(kind, folder, options.rounds):
                if dist.get_rank() == 0:
                    print(line, flush=True)
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
            dist.barrier()
    sys.stdout.flush()
    for child in multiprocessing.active_children():  # of megatron-core; they would go on for ever
        child.kill()
    os._exit(0)  # peers leave threads and processes that would end the process with an error


def main() -> int:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--states", nargs="+", default=STATES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--folder", help="folder on the disk that is measured")
    options = parser.parse_args()
    if not options.save and not options.load:
        options.save = options.load = True
    if "RANK" in os.environ:
        run_rank(options)
    print(f"{machine()}, torch {torch.__version__}, ranks of one thread")
    return max(run_on_ranks("benchmarks.checkpoints", size, options.folder) for size in options.ranks)


if __name__ == "__main__":
    sys.exit(main())
