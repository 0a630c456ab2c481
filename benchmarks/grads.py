"""`python -m benchmarks.grads`: training steps, collectives and hooks of two ranks, against their peers.

All contenders run in the same two processes, in turn, so that a machine that slows down slows all of them. CPU time is
that of all threads of a rank; of two ranks the larger counts. A GPT of 42 million parameters in fp32 with AdamW
(`fused=True`) and clipping, one thread per rank.

    python -m benchmarks.grads             all of it
    python -m benchmarks.grads steps       only the training steps; likewise `collectives` and `hooks`
"""

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.harness import machine

RANKS, WARM_UP, STEPS = 2, 3, 20
WIDTH, LAYERS, VOCABULARY, LENGTH, HEADS = 512, 8, 16384, 128, 8
BUCKET = 6_000_000
BATCHES = {"2 x 128": (2, 128), "1 x 32": (1, 32)}
"""Rows and tokens per rank."""
WANTED = {
    "2 x 128": {"ddp": 0.95, "zero": 0.93, "megatron": 0.76, "fsdp2": 0.7},
    "1 x 32": {"ddp": 0.78, "zero": 0.7, "megatron": 0.48, "fsdp2": 0.4},
}
"""CPU time of Trackbed that is wanted, as a part of each peer's."""
Step = Callable[[torch.Tensor], None]


class Block(nn.Module):
    """Causal attention, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[rows, tokens, width]` to the same shape."""
        rows, tokens, width = x.shape
        parts = self.attention(self.norms[0](x)).view(rows, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """GPT with 42 million parameters in 101 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of `[rows, tokens + 1]` token ids."""
        read = tokens[:, :-1]
        x = self.embedding(read) + self.positions(torch.arange(read.shape[1]))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def new_model() -> Model:
    """The same model on every rank and for every contender."""
    torch.manual_seed(1)
    return Model()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over a model's parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def torch_step(model: nn.Module, optimizer: Any) -> Step:
    """A step as torch's programs write it."""

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def local() -> Step:
    """One rank without communication."""
    model = new_model()
    return torch_step(model, adamw(model))


def ddp() -> Step:
    """PyTorch's DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
    return torch_step(model, adamw(model))


def zero() -> Step:
    """PyTorch's DistributedDataParallel with ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=True
    )
    return torch_step(model, optimizer)


def fsdp2() -> Step:
    """PyTorch's FSDP2, which keeps gathered parameters until the backward pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = new_model()
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return torch_step(model, adamw(model))


def megatron() -> Step:
    """Megatron Core's DistributedDataParallel and DistributedOptimizer, both overlapped."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/conformance/megatron_lm"))
    import cuda_shim

    cuda_shim.MODE.__exit__(None, None, None)
    with cuda_shim.MODE:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        parallel_state.initialize_model_parallel()
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=BUCKET
        )
        model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1), ddp_config=config, module=new_model()
        )
        options = OptimizerConfig(
            optimizer="adam", lr=1e-4, clip_grad=1.0, use_distributed_optimizer=True, overlap_param_gather=True
        )
        optimizer = get_megatron_optimizer(options, [model])
    for chained in optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            group.update(fused=True, foreach=False)

    def step(tokens: torch.Tensor) -> None:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(tokens).backward()
        model.finish_grad_sync()
        with cuda_shim.MODE:
            optimizer.step()

    return step


def trackbed(*, sharded: bool, observer: Any = None) -> Step:
    """Trackbed, with everything overlapped."""
    from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig
    from trackbed.optim import DataParallelOptimizer

    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        use_distributed_optimizer=sharded,
        overlap_param_gather=sharded,
        bucket_size=BUCKET,
    )
    model = DistributedDataParallel(None, config, new_model(), observer=observer)
    optimizer = DataParallelOptimizer(adamw(model.module), model, max_norm=1.0)

    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()

    return step


def measure(steps: Mapping[str, Step], rows: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Median CPU and wall milliseconds of a step of each contender, the larger of the ranks' medians."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    batches = torch.Generator().manual_seed(2 + dist.get_rank())
    names = list(steps)
    for number in range(WARM_UP + STEPS):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            batch = torch.randint(VOCABULARY, (rows, tokens + 1), generator=batches)
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name](batch)
            if number >= WARM_UP:
                found[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    of_rank = [[statistics.median(column) for column in zip(*taken, strict=True)] for taken in found.values()]
    medians = torch.tensor(of_rank)
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return {name: (1e3 * cpu, 1e3 * wall) for name, (cpu, wall) in zip(names, medians.tolist(), strict=True)}


def steps_tables() -> Iterator[str]:
    """Tables of the training steps."""
    steps = {
        "local": local(),
        "ddp": ddp(),
        "zero": zero(),
        "fsdp2": fsdp2(),
        "trackbed": trackbed(sharded=False),
        "trackbed, sharded": trackbed(sharded=True),
        "megatron": megatron(),
    }
    for title, (rows, tokens) in BATCHES.items():
        found = measure(steps, rows, tokens)
        yield f"\n{title} tokens per rank\n"
        yield "| | CPU ms | wall ms | Trackbed's CPU | at most |\n|---|---:|---:|---:|---:|"
        for name, (cpu, wall) in found.items():
            wanted = WANTED[title].get(name)
            ours = found["trackbed" if name == "ddp" else "trackbed, sharded"][0]
            ratio = "" if wanted is None else f"{ours / cpu:.2f}x"
            yield f"| {name} | {cpu:.0f} | {wall:.0f} | {ratio} | {'' if wanted is None else f'{wanted}x'} |"


def collectives_table() -> Iterator[str]:
    """Table of collectives on 160 MB, scaling by 1/n included."""
    from trackbed.comm.torch_group import TorchGroup
    from trackbed.grads.buffer import BufferMemory
    from trackbed.grads.collectives import Label, SharedMemoryCollectives, TorchCollectives

    numel = 42_064_000 // 128 * 128
    memory = BufferMemory(numel, torch.float32, torch.device("cpu"))
    if memory.shared is None:
        raise SystemExit(f"benchmarks need memory that processes can share: {memory.problem}")
    shared = SharedMemoryCollectives.connect(TorchGroup(), [memory.shared])
    if isinstance(shared, str):
        raise SystemExit(shared)
    gloo = TorchCollectives(dist.group.WORLD)
    other = torch.ones(numel)
    memory.tensor.fill_(1.0)
    options = {"scale": 1 / RANKS, "average": False, "label": Label()}
    runs = {
        "all-reduce": (4, 4, lambda which, at: which.all_reduce([at], **options).wait()),
        "reduce-scatter": (8, 4, lambda which, at: which.reduce_scatter([at], **options).wait()),
        "all-gather": (8, 2, lambda which, at: which.all_gather([at], label=Label()).wait()),
    }
    copied = np.empty(numel, dtype=np.float32)
    yield "\n160 MB in fp32\n\n| | Trackbed ms | gloo ms | times | at least | floor ms | of the floor |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, (wanted, halves, run) in runs.items():
        seconds: dict[str, list[float]] = {"ours": [], "gloo": [], "copy": []}
        for number in range(14):
            for key, call in (
                ("ours", lambda run=run: run(shared, memory.tensor)),
                ("gloo", lambda run=run: run(gloo, other)),
                ("copy", lambda: np.copyto(copied, other.numpy())),
            ):
                dist.barrier()
                started = time.perf_counter()
                call()
                if number >= 3:
                    seconds[key].append(time.perf_counter() - started)
            other.fill_(1.0)
            memory.tensor.fill_(1.0)
        medians = torch.tensor([statistics.median(seconds[key]) for key in ("ours", "gloo", "copy")])
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        ours, theirs, copy = (1e3 * value for value in medians.tolist())
        floor = copy * halves / 4  # a copy reads and writes all, which is four halves
        times = f"{ours:.1f} | {theirs:.1f} | {theirs / ours:.1f} | {wanted} | {floor:.1f} | {ours / floor:.1f}"
        yield f"| {name} | {times} |"


def hooks_table() -> Iterator[str]:
    """Table of what a backward pass takes longer for 1,000 parameters in 10 buckets."""
    from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(1000)])

        def forward(self) -> torch.Tensor:
            return torch.stack([(part * 2.0).sum() for part in self.parts]).sum()

    bare, ours_module = Many(), Many()
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=6400)
    ours = DistributedDataParallel(None, config, ours_module)
    theirs = nn.parallel.DistributedDataParallel(Many(), gradient_as_bucket_view=True, bucket_cap_mb=6400 * 4 / 2**20)

    def backward(model: nn.Module, before: Callable[[], Any], within: Any, after: Callable[[], Any]) -> float:
        before()
        with within():
            loss = model()
            dist.barrier()
            started = time.process_time()
            loss.backward()
            stopped = time.process_time()
        after()
        return stopped - started

    def nothing() -> None:
        pass

    null = contextlib.nullcontext
    runs = {
        "bare backward": lambda: backward(bare, lambda: bare.zero_grad(set_to_none=True), null, nothing),
        "Trackbed": lambda: backward(ours, ours.zero_grad_buffer, null, ours.finish_grad_sync),
        "Trackbed, no_sync": lambda: backward(ours, ours.zero_grad_buffer, ours.no_sync, nothing),
        "DDP": lambda: backward(theirs, nothing, null, nothing),
        "DDP, no_sync": lambda: backward(theirs, nothing, theirs.no_sync, nothing),
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(43):
        for name, run in runs.items():
            took = run()
            if number >= 3:
                found[name].append(took)
    yield "\n1,000 parameters of 64 elements in 10 buckets, CPU time of the backward pass\n"
    yield "| | us per parameter over a bare backward, least of 40 |\n|---|---:|"
    base = min(found["bare backward"])
    for name, values in list(found.items())[1:]:
        yield f"| {name} | {1e3 * (min(values) - base):.1f} |"


TABLES = {"collectives": collectives_table, "hooks": hooks_table, "steps": steps_tables}


def run_rank(wanted: list[str]) -> None:
    """Runs the tables on one rank; rank 0 prints them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in wanted:
        for line in TABLES[name]():
            if dist.get_rank() == 0:
                print(line, flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # peers leave threads that would end the process with an error


def main() -> int:
    """Starts the ranks."""
    wanted = sys.argv[1:] or list(TABLES)
    if "RANK" in os.environ:
        run_rank(wanted)
    print(f"{machine()}, torch {torch.__version__}, {RANKS} ranks of one thread")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.grads", *wanted]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"})
        for rank in range(RANKS)
    ]
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
