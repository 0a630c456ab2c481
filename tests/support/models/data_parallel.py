"""A small model with tied, frozen and expert parameters, its training on several ranks, and a plain reference of it.

Micro-batch j of a global batch belongs to rank j mod n, as its number j div n; the loss is divided by the number of
micro-batches of each rank.
"""

import contextlib
import copy
import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer, global_norm

VOCABULARY, WIDTH, STEPS, CLIP, RATE = 40, 24, 20, 0.5, 2e-3


TYPES = {
    "fp32": (torch.float32, {}),
    "bf16 with fp32 gradients": (torch.bfloat16, {"grad_reduce_in_fp32": True}),
    "bf16": (torch.bfloat16, {}),
}
WAYS = {
    f"{'sharded' if sharded else 'whole'}, {'overlap' if overlap else 'no overlap'}, {buckets}": {
        "use_distributed_optimizer": sharded,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": sharded and overlap,
        "bucket_size": None if buckets == "one bucket" else 700,
    }
    for sharded, overlap, buckets in itertools.product((False, True), (False, True), ("one bucket", "many buckets"))
}


class Model(nn.Module):
    """Embedding, three layers, one of them frozen and one an expert, and an output tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.norm = nn.Linear(WIDTH, 50), nn.LayerNorm(50)
        self.expert = nn.Linear(50, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        x = self.norm(self.first(self.embedding(tokens)).relu())
        return self.head(self.frozen(self.expert(x)))


def new_model(dtype=torch.float32, device="cpu"):
    """The same model each time, on any device. Its own generator is used, because ranks may be threads."""
    with torch.device("meta"):
        model = Model()
    model = model.to_empty(device="cpu")
    model.head.weight = model.embedding.weight
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.normal_(0.0, 0.2, generator=generator)
            if name == "norm.weight":
                parameter += 1.0
    model = model.to(device, dtype)
    for parameter in model.expert.parameters():
        parameter.allreduce = False
    model.frozen.requires_grad_(False)
    return model


def batch(number):
    """The tokens of a micro-batch."""
    return torch.randint(0, VOCABULARY, (6, 5), generator=torch.Generator().manual_seed(number))


def loss_of(model, number, num_micro):
    """The loss of a micro-batch: a token is to be predicted from itself."""
    tokens = batch(number).to(next(model.parameters()).device)
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()) / num_micro


@dataclass(frozen=True)
class Case:
    """One way to train the model."""

    dtype: torch.dtype = torch.float32
    device: str = field(default="cpu", kw_only=True)
    num_micro: int = 1
    steps: int = STEPS
    clip: float | None = CLIP
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """Losses, norms, parameters and state after a training, on one rank."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]
    state: dict[str, Any]

    def digest(self):
        """Checksum of the parameters and the optimizer's state, and the norms, to the last bit."""
        found = hashlib.sha256()
        tensors = dict(self.parameters)
        for name, state in sorted(self.state["state"].items()):
            tensors.update({f"{name}/{key}": value for key, value in sorted(state.items())})
        for name, tensor in tensors.items():
            found.update(name.encode() + tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return [found.hexdigest(), [norm.hex() for norm in self.norms]]


def wrap(group, case, model=None, **arguments):
    """The wrapped model and its optimizer."""
    model = new_model(case.dtype, case.device) if model is None else model
    config = DistributedDataParallelConfig(**case.options)
    wrapper = DistributedDataParallel(None, config, model, process_group=group, **arguments)
    optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=RATE), wrapper, max_norm=case.clip)
    return wrapper, optimizer


def run_steps(wrapper, optimizer, case, start=0, stop=None):
    """Trains from one step to another. Returns the losses of this rank, and the norms."""
    rank, size = wrapper.dp_group.rank(), wrapper.dp_group.size()
    losses, norms = [], []
    for step in range(start, case.steps if stop is None else stop):
        optimizer.zero_grad()
        for micro in range(case.num_micro):
            number = (step * case.num_micro + micro) * size + rank
            is_last = micro == case.num_micro - 1
            with contextlib.nullcontext() if is_last else wrapper.no_sync():
                loss = loss_of(wrapper, number, case.num_micro)
                loss.backward()
                losses.append(loss.item())
        norms.append(optimizer.step().norm)
    return losses, norms


def train(group, case, **arguments):
    """Trains the model on one rank of a group."""
    wrapper, optimizer = wrap(group, case, **arguments)
    losses, norms = run_steps(wrapper, optimizer, case)
    state = optimizer.full_state_dict()
    return Outcome(losses, norms, {name: value.clone() for name, value in wrapper.state_dict().items()}, state)


def reference(size, case):
    """The same training in one process, which scales and adds the ranks' gradients in the stated order."""
    model = new_model(case.dtype, case.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    is_copied = case.dtype != torch.float32
    mains = [nn.Parameter(parameter.detach().float()) if is_copied else parameter for parameter in trained]
    optimizer = torch.optim.AdamW(mains, lr=RATE)
    grad_dtype = torch.float32 if case.options.get("grad_reduce_in_fp32") else case.dtype
    losses, norms = [[] for _ in range(size)], []
    for step in range(case.steps):
        of_ranks = []
        for rank in range(size):
            sums = [torch.zeros_like(parameter, dtype=grad_dtype) for parameter in trained]
            for micro in range(case.num_micro):
                loss = loss_of(model, (step * case.num_micro + micro) * size + rank, case.num_micro)
                losses[rank].append(loss.item())
                for total, gradient in zip(sums, torch.autograd.grad(loss, trained), strict=True):
                    total += gradient
            of_ranks.append([total * (1 / size) for total in sums])
        gradients = [tree_sum(list(terms)) for terms in zip(*of_ranks, strict=True)]
        norms.append(global_norm(gradients))
        factor = None if case.clip is None else case.clip / (norms[-1] + 1e-6)
        for main, gradient in zip(mains, gradients, strict=True):
            main.grad = gradient.float()
            if factor is not None and factor < 1:
                main.grad *= float(np.float32(factor))
        optimizer.step()
        with torch.no_grad():
            for parameter, main in zip(trained, mains, strict=True):
                parameter.copy_(main)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {}
    for parameter, main in zip(trained, mains, strict=True):
        states[names[id(parameter)]] = {**optimizer.state[main], **({"main_param": main.detach()} if is_copied else {})}
    return losses, Outcome(losses[0], norms, dict(model.state_dict()), {"state": states})


def tree_sum(terms):
    """The sum in the order that the collectives promise, rounded once."""
    dtype = terms[0].dtype
    terms = [term.float() for term in terms]
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        terms = [terms[i] + terms[i + half] if i + half < len(terms) else terms[i] for i in range(half)]
    return terms[0].to(dtype)


def torch_losses(size, case):
    """Losses of each rank with plain PyTorch in fp32: the mean of the ranks' gradients, AdamW, and torch's clipping."""
    model = copy.deepcopy(new_model())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE)
    losses = [[] for _ in range(size)]
    for step in range(case.steps):
        optimizer.zero_grad()
        for micro in range(case.num_micro):
            for rank in range(size):
                loss = loss_of(model, (step * case.num_micro + micro) * size + rank, case.num_micro)
                losses[rank].append(loss.item())
                (loss / size).backward()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(trained, case.clip)
        optimizer.step()
    return losses
