"""Training steps on one GPU, with Trackbed, with PyTorch's wrapper and with neither.

All contenders live in one process and take turns: a few steps to warm up, then rounds of a few steps in rotated order.
Time is that of CUDA events around the steps, the median of all rounds. A GPT of 407 million parameters with AdamW
(`fused=True`) and clipping, 8 rows of 2,048 tokens; and a small one, whose steps are bound by the host.
"""

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import trackbed

Step = Callable[[torch.Tensor], None]
VOCABULARY, HEADS, LENGTH = 50_304, 16, 2048


class Block(nn.Module):
    """Causal attention, and a feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps `[rows, tokens, width]` to the same shape."""
        rows, tokens, width = x.shape
        parts = self.attention(self.norms[0](x)).view(rows, tokens, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(rows, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """GPT of some width and number of layers, whose output layer is not tied to the embedding."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Loss of `[rows, tokens + 1]` token ids."""
        read = tokens[:, :-1]
        x = self.embedding(read) + self.positions(torch.arange(read.shape[1], device=read.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Contenders:
    """Steps of one size of model, each with a model and an optimizer of its own."""

    def __init__(self, device: str, width: int, layers: int, vocabulary: int) -> None:
        self.device = device
        self.size = width, layers, vocabulary

    def model(self, dtype: torch.dtype = torch.float32) -> Model:
        """The same model for every contender."""
        torch.manual_seed(1)
        with torch.device(self.device):
            return Model(*self.size).to(dtype)

    def loss(self, model: nn.Module, tokens: torch.Tensor, *, autocasts: bool) -> torch.Tensor:
        """Loss, in mixed precision or in that of the model."""
        with torch.autocast(self.device, torch.bfloat16) if autocasts else contextlib.nullcontext():
            return model(tokens)  # type: ignore[no-any-return]

    def plain(self) -> Step:
        """PyTorch without any wrapper."""
        return self.torchs(self.model())

    def ddp(self) -> Step:
        """PyTorch's DistributedDataParallel."""
        return self.torchs(nn.parallel.DistributedDataParallel(self.model(), gradient_as_bucket_view=True))

    def torchs(self, model: nn.Module) -> Step:
        """A step as PyTorch's programs write it."""
        optimizer = adamw(model.parameters())

        def step(tokens: torch.Tensor) -> None:
            optimizer.zero_grad(set_to_none=True)
            self.loss(model, tokens, autocasts=True).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    def plain_bf16(self) -> Step:
        """Weights in bfloat16 with copies in float32, by hand."""
        model = self.model(torch.bfloat16)
        params = list(model.parameters())
        mains = [nn.Parameter(param.detach().float()) for param in params]
        optimizer = adamw(mains)

        def step(tokens: torch.Tensor) -> None:
            self.loss(model, tokens, autocasts=False).backward()
            for main, param in zip(mains, params, strict=True):
                main.grad, param.grad = param.grad.float(), None  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(mains, 1.0)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(params, mains)

        return step

    def trackbeds(self, dtype: torch.dtype = torch.float32, **options: Any) -> Step:
        """Trackbed's wrapper and optimizer."""
        config = trackbed.DistributedDataParallelConfig(overlap_grad_reduce=True, **options)
        wrapper = trackbed.DistributedDataParallel(self.model(dtype), config)
        optimizer = trackbed.DataParallelOptimizer(adamw(wrapper.parameters()), wrapper, max_norm=1.0)

        def step(tokens: torch.Tensor) -> None:
            optimizer.zero_grad()
            self.loss(wrapper, tokens, autocasts=dtype == torch.float32).backward()
            optimizer.step()

        return step


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW in one kernel."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def fp32_weights(of: Contenders) -> dict[str, Callable[[], Step]]:
    """Weights and gradients in float32, products in bfloat16."""
    sharded = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    return {
        "plain": of.plain,
        "ddp": of.ddp,
        "trackbed": of.trackbeds,
        "trackbed torch": lambda: of.trackbeds(collectives="torch"),
        "trackbed sharded": lambda: of.trackbeds(collectives="torch", **sharded),
    }


def bf16_weights(of: Contenders) -> dict[str, Callable[[], Step]]:
    """Weights in bfloat16, with copies in float32."""
    return {
        "plain bf16": of.plain_bf16,
        "trackbed bf16, fp32 gradients": lambda: of.trackbeds(torch.bfloat16, grad_reduce_in_fp32=True),
        "trackbed bf16, bf16 gradients": lambda: of.trackbeds(torch.bfloat16),
    }


def measure(
    contenders: dict[str, Callable[[], Step]], tokens: torch.Tensor, *, rounds: int, count: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, and peak memory in GB above what all hold, of each contender."""
    steps, held = {}, {}
    gc.collect()
    torch.cuda.empty_cache()
    for name, make in contenders.items():
        before = torch.cuda.memory_allocated()
        steps[name] = make()
        for _ in range(3):
            steps[name](tokens)
        torch.cuda.synchronize()
        held[name] = torch.cuda.memory_allocated() - before
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks: dict[str, float] = {}
    for number in range(rounds):
        names = list(steps)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began = time.perf_counter()
            start.record()
            for _ in range(count):
                steps[name](tokens)
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end) if tokens.is_cuda else (time.perf_counter() - began) * 1000
            times[name].append(elapsed / count)
            peaks[name] = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() + held[name]
    return {
        name: {"ms": statistics.median(found), "fastest": min(found), "GB": peaks[name] / 1e9}
        for name, found in times.items()
    }


@contextlib.contextmanager
def one_rank(backend: str) -> Iterator[None]:
    """In the block, the process is the one rank of a process group."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def measure_all(*, device: str = "cuda", rows: int = 8, length: int = LENGTH, rounds: int = 4) -> dict[str, Any]:
    """All contenders of all sizes; of the host alone, tiny ones, to rehearse."""
    is_real = device == "cuda"
    large = Contenders(device, *((1024, 24, VOCABULARY) if is_real else (32, 2, 64)))
    small = Contenders(device, *((256, 24, VOCABULARY) if is_real else (16, 2, 64)))
    if not is_real:
        rows, length, rounds = 1, 8, 1
    tokens = torch.randint(0, large.size[2], (rows, length + 1), device=device)
    few = tokens[:1, : min(length, 1024) + 1]
    found: dict[str, Any] = {}
    with one_rank("nccl" if is_real else "gloo"):
        found["large, fp32 weights"] = measure(fp32_weights(large), tokens, rounds=rounds, count=4)
        found["large, bf16 weights"] = measure(bf16_weights(large), tokens, rounds=rounds, count=4)
        found["small, fp32 weights"] = measure(fp32_weights(small), few, rounds=rounds, count=4)
    return found
