"""Models, optimizers and steps that are drawn from a seed, and what torch alone makes of them."""

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.support.models.data_parallel import tree_sum
from trackbed.optim import global_norm

CONFIGS = {
    "default": {},
    "overlap": {"overlap_grad_reduce": True, "bucket_size": 12},
    "sharded": {"use_distributed_optimizer": True},
    "sharded, overlap": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 12,
    },
}
LOW = (torch.bfloat16, torch.float16)
TYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Own(torch.optim.Optimizer):
    """A program's own optimizer: a momentum in float64, a count in int64, a mask, and plain values."""

    is_elementwise = True

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["sum"] = torch.zeros_like(param, dtype=torch.float64)
                    state["count"] = torch.zeros_like(param, dtype=torch.int64)
                    state["mask"] = torch.zeros_like(param, dtype=torch.bool)
                    state["limits"] = (-float("inf"), 2**70)
                state["sum"].mul_(0.9).add_(param.grad)
                state["count"] += 1
                state["mask"] |= param.grad > 0
                update = state["sum"] / state["count"].sqrt() + state["mask"] * 1e-3
                param.sub_((group["lr"] * update).to(param.dtype))


def kinds_of_optimizers():
    """Name, class and options of each optimizer, in each of torch's implementations."""
    more: dict[str, dict[str, Any]] = {
        "SGD": {"momentum": 0.9, "weight_decay": 0.1},
        "RMSprop": {"momentum": 0.5},
        "Adam": {"amsgrad": True},
        "AdamW": {"weight_decay": 0.3},
        "Adagrad": {"lr_decay": 0.1},
    }
    names = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
    found = [("Own", Own, {"lr": 0.05})]
    for name in names:
        options = {"lr": 0.05, **more.get(name, {})}
        found.append((name, getattr(torch.optim, name), {**options, "foreach": False}))
        found.append((f"{name}, foreach", getattr(torch.optim, name), {**options, "foreach": True}))
        if name in ("Adagrad", "Adam", "AdamW", "SGD"):
            found.append((f"{name}, fused", getattr(torch.optim, name), {**options, "fused": True}))
    return found


KINDS = kinds_of_optimizers()


class Scalar(nn.Module):
    """A parameter without axes, one without elements, and a buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, inputs):
        return inputs * self.scale + self.shift + self.none.sum()


class Counted(nn.Module):
    """A linear layer with extra state."""

    def __init__(self):
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), 0

    def forward(self, inputs):
        self.count += 1
        return self.linear(inputs)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


class Image(nn.Module):
    """A convolution over an image of 2 by 2."""

    def __init__(self, is_turned):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 2)
        if is_turned:
            self.conv = nn.Conv2d(2, 3, (2, 1)).to(memory_format=torch.channels_last)

    def forward(self, inputs):
        channels = self.conv.in_channels
        return self.conv(inputs.reshape(-1, channels, 2, 2 // channels)).flatten(1)


class Turned(nn.Module):
    """A weight whose elements lie in memory by columns."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5).t())

    def forward(self, inputs):
        return inputs @ self.weight.t()


PARTS = [
    lambda draw: nn.Linear(4, draw.choice((1, 4, 7)), bias=draw.random() < 0.7),
    lambda draw: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))),
    lambda draw: Image(is_turned=False),
    lambda draw: Image(is_turned=True),
    lambda draw: Turned(),
    lambda draw: Scalar(),
    lambda draw: Counted(),
    lambda draw: weight_norm(nn.Linear(4, 3)),
    lambda draw: nn.BatchNorm1d(4),
]


class Net(nn.Module):
    """Parts of which each step uses some; some share a module or a parameter."""

    def __init__(self, draw):
        super().__init__()
        self.parts = nn.ModuleList()
        for _ in range(draw.randint(1, 4)):
            part = draw.choice(PARTS)(draw)
            dtype = draw.choice(TYPES[:2] + TYPES[4:] if isinstance(part, nn.BatchNorm1d) else TYPES)
            self.parts.append(part.to(dtype))
        if draw.random() < 0.3:
            self.parts.append(self.parts[0])
        if draw.random() < 0.2:
            one, other = nn.Linear(4, 4), nn.Linear(4, 4)
            other.weight = one.weight
            self.parts.append(nn.Sequential(one, nn.ReLU(), other))
        if draw.random() < 0.2:
            self.parts[draw.randrange(len(self.parts))].requires_grad_(False)

    def forward(self, used, inputs):
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for number in used:
            part = self.parts[number]
            dtype = next(part.parameters()).dtype
            total = total + part(inputs[number].to(dtype)).tanh().double().square().mean()
        return total


@dataclass
class Case:
    """One drawn training."""

    seed: int
    kinds: list[int]
    """Numbers of the optimizers in `KINDS`: one, or two that have some parameters each."""
    config: str
    other_config: str
    """Configuration in which the training goes on."""
    num_ranks: int
    load: str
    """State that is loaded there."""
    max_norm: float | None
    reduces_in_fp32: bool
    before: int = 2
    """Steps before the state is saved."""
    steps: int = 4
    micros: list[int] = field(default_factory=list)
    """Backward passes of each step."""

    @staticmethod
    def draw(number: int, num_ranks: int) -> "Case":
        """The case with a number: each optimizer meets each configuration in turn."""
        draw = random.Random(number)
        names = list(CONFIGS)
        kinds = [number % len(KINDS)]
        if draw.random() < 0.3:
            kinds.append(draw.randrange(len(KINDS)))
        return Case(
            seed=number,
            kinds=kinds,
            config=names[number // len(KINDS) % len(names)],
            other_config=draw.choice(names),
            num_ranks=num_ranks,
            load=draw.choice(("full", "sharded")),
            max_norm=draw.choice((None, 0.05)),
            reduces_in_fp32=draw.random() < 0.3,
            micros=[draw.choice((1, 1, 2)) for _ in range(4)],
        )

    def new_module(self) -> Net:
        """The model, the same each time."""
        torch.manual_seed(self.seed)
        return Net(random.Random(self.seed + 1))

    def used(self, module: Net, step: int, micro: int, rank: int) -> list[int]:
        """Parts that a rank uses in a backward pass; perhaps none."""
        draw = random.Random(f"{self.seed} {step} {micro} {rank}")
        return [number for number in range(len(module.parts)) if draw.random() < 0.6]

    def inputs(self, module: Net, step: int, micro: int, rank: int) -> list[torch.Tensor]:
        """Inputs of each part."""
        source = torch.Generator().manual_seed(self.seed * 1000 + step * 100 + micro * 10 + rank)
        return [torch.randn(3, 4, generator=source) for _ in module.parts]

    def optimizers(self, params: list[nn.Parameter], names: list[str]) -> list[torch.optim.Optimizer]:
        """The optimizers of some parameters, by name alike for any list of the same names."""
        draw = random.Random(self.seed + 2)
        owner = {name: draw.randrange(len(self.kinds)) for name in names}
        found = []
        for place, number in enumerate(self.kinds):
            own = [param for param, name in zip(params, names, strict=True) if owner[name] == place]
            _, kind, options = KINDS[number]
            if own:
                half = draw.randrange(len(own)) if draw.random() < 0.3 else 0
                groups = [{"params": own[:half]}, {"params": own[half:], "lr": 0.02}] if half else own
                found.append(kind(groups, **options))
        return found

    def is_rounded(self, config: str) -> bool:
        """True if a fused optimizer is sharded, whose kernels round the ends of pieces otherwise."""
        return "sharded" in config and any("fused" in KINDS[number][0] for number in self.kinds)


class Reference:
    """What torch's optimizers make of the mean of the gradients that hooks saw on the ranks."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.module = case.new_module()
        named = [(name, param) for name, param in self.module.named_parameters() if param.requires_grad]
        self.names = [name for name, _ in named]
        self.dtypes = [param.dtype for _, param in named]
        self.mains = [
            nn.Parameter(copy.deepcopy(param.detach()).float() if param.dtype in LOW else copy.deepcopy(param.detach()))
            for _, param in named
        ]
        self.optimizers = case.optimizers(self.mains, self.names) if named else []

    def step(self, of_ranks: list[dict[str, list[torch.Tensor]]]) -> float:
        """Takes a step with the gradients of each rank's backward passes by name. Returns the norm."""
        reduced: dict[str, torch.Tensor] = {}
        for name, dtype in zip(self.names, self.dtypes, strict=True):
            kind = torch.float32 if self._case.reduces_in_fp32 else dtype
            if any(name in seen for seen in of_ranks):
                reduced[name] = tree_of([self._sum(seen.get(name, []), kind) for seen in of_ranks])
        norm = global_norm(reduced.values())
        factor = 1.0
        if self._case.max_norm is not None:
            factor = min(1.0, float(np.float32(self._case.max_norm / (norm + 1e-6))))
        for name, main in zip(self.names, self.mains, strict=True):
            main.grad = None
            if name in reduced:
                gradient = reduced[name].float() if reduced[name].dtype in LOW else reduced[name]
                main.grad = torch.empty_like(main).copy_(gradient * factor if factor < 1.0 else gradient)
        for optimizer in self.optimizers:
            step(optimizer)
        return norm

    def _sum(self, terms: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
        if not terms:
            return None
        total = torch.zeros_like(terms[0], dtype=dtype)
        for term in terms:
            total += term
        return total * (1 / self._case.num_ranks) if self._case.num_ranks > 1 else total

    def values(self) -> dict[str, torch.Tensor]:
        """Parameters by name."""
        pairs = zip(self.names, self.mains, self.dtypes, strict=True)
        return {name: main.detach().to(dtype) for name, main, dtype in pairs}

    def states(self) -> dict[str, dict[str, Any]]:
        """States by name, of the parameters that have one, with the float32 copies."""
        states = {main: state for one in self.optimizers for main, state in one.state.items()}
        return {name: states[main] for name, main in zip(self.names, self.mains, strict=True) if states.get(main)}


def step(optimizer: torch.optim.Optimizer) -> None:
    """Takes a step, of torch's fused SGD one parameter at a time: it fails where some have no momentum yet."""
    if not isinstance(optimizer, torch.optim.SGD):
        optimizer.step()
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    gradients = [param.grad for param in params]
    for param, gradient in zip(params, gradients, strict=True):
        for other in params:
            other.grad = gradient if other is param else None
        optimizer.step()


def tree_of(terms: list[torch.Tensor | None]) -> torch.Tensor:
    """Sum of the ranks' gradients, of which some are missing, in the stated order."""
    like = next(term for term in terms if term is not None)
    found = [torch.zeros_like(like) if term is None else term for term in terms]
    if like.dtype == torch.float64:
        return sum(found[1:], found[0])
    return tree_sum(found)
