"""Gradients that a loss of another model brings after a step change nothing: two models are trained in turn."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

from tests.support.tiers import slow_but
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import GradientError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 3}
WAYS = {
    "default": {},
    "overlap": OVERLAP,
    "sharded": {"use_distributed_optimizer": True},
    "sharded, overlap": OVERLAP | {"use_distributed_optimizer": True, "overlap_param_gather": True},
}


def networks(dtype):
    """A generator and a discriminator, the same each time."""
    source, modules = torch.Generator().manual_seed(0), []
    for width in (2, 1):
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, width))
        module = module.to_empty(device="cpu")
        with torch.no_grad():
            for param in module.parameters():
                param.normal_(generator=source)
        modules.append(module.to(dtype))
    return modules


class Pair:
    """Two models, wrapped or not, with their optimizers, and inputs of a rank."""

    def __init__(self, group, config, dtype):
        self.modules = networks(dtype)
        self.rank, self.dtype, self.number = 0, dtype, 0
        if group is None:
            self.g, self.d = self.modules
        else:
            self.rank = group.rank
            self.g, self.d = (DistributedDataParallel(module, config, process_group=group) for module in self.modules)
        self.of_g, self.of_d = (torch.optim.Adam(module.parameters(), lr=0.05) for module in self.modules)
        if group is not None:
            self.of_g = DataParallelOptimizer(self.of_g, self.g)
            self.of_d = DataParallelOptimizer(self.of_d, self.d)

    def inputs(self):
        self.number += 1
        source = torch.Generator().manual_seed(100 * self.number + self.rank)
        return torch.randn(4, 2, generator=source).to(self.dtype)

    def loss_of_d(self, detaches=True):
        fake = self.g(self.inputs())
        return self.d(self.inputs()).mean() - self.d(fake.detach() if detaches else fake).mean()

    def loss_of_g(self, freezes=False):
        with frozen(self.modules[1]) if freezes else contextlib.nullcontext():
            return -self.d(self.g(self.inputs())).mean()

    def parameters(self):
        return [param.detach().clone() for module in self.modules for param in module.parameters()]


@contextlib.contextmanager
def frozen(module):
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)


def step(pair, optimizer, loss):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


def discriminator_first(pair, freezes):
    step(pair, pair.of_d, pair.loss_of_d)
    step(pair, pair.of_g, lambda: pair.loss_of_g(freezes))


def generator_first(pair, freezes):
    step(pair, pair.of_g, lambda: pair.loss_of_g(freezes))
    step(pair, pair.of_d, pair.loss_of_d)


def without_detach(pair, freezes):
    step(pair, pair.of_d, lambda: pair.loss_of_d(detaches=False))
    step(pair, pair.of_g, lambda: pair.loss_of_g(freezes))


def both_set_to_zero(pair, freezes):
    for optimizer, loss in ((pair.of_d, pair.loss_of_d), (pair.of_g, lambda: pair.loss_of_g(freezes))):
        pair.of_d.zero_grad()
        step(pair, optimizer, loss)


def two_passes_of_the_discriminator(pair, freezes):
    pair.of_d.zero_grad()
    pair.d(pair.inputs()).mean().backward()
    (-pair.d(pair.g(pair.inputs()).detach()).mean()).backward()
    pair.of_d.step()
    step(pair, pair.of_g, lambda: pair.loss_of_g(freezes))


def generator_first_and_two_passes(pair, freezes):
    step(pair, pair.of_g, lambda: pair.loss_of_g(freezes))
    pair.of_d.zero_grad()
    pair.d(pair.inputs()).mean().backward()
    (-pair.d(pair.g(pair.inputs()).detach()).mean()).backward()
    pair.of_d.step()


def two_steps_of_the_discriminator(pair, freezes):
    for _ in range(2):
        step(pair, pair.of_d, pair.loss_of_d)
        with torch.no_grad():
            for param in pair.modules[1].parameters():
                param.clamp_(-1, 1)
    step(pair, pair.of_g, lambda: pair.loss_of_g(freezes))


def two_steps_of_the_generator(pair, freezes):
    step(pair, pair.of_d, pair.loss_of_d)
    for _ in range(2):
        step(pair, pair.of_g, lambda: pair.loss_of_g(freezes))


def through_the_module_itself(pair, freezes):
    step(pair, pair.of_d, pair.loss_of_d)
    with frozen(pair.modules[1]) if freezes else contextlib.nullcontext():
        step(pair, pair.of_g, lambda: -pair.modules[1](pair.g(pair.inputs())).mean())


LOOPS = [
    discriminator_first,
    generator_first,
    without_detach,
    both_set_to_zero,
    two_passes_of_the_discriminator,
    generator_first_and_two_passes,
    two_steps_of_the_discriminator,
    two_steps_of_the_generator,
    through_the_module_itself,
]


def trained(group, loop, way, dtype, freezes):
    pair = Pair(group, DistributedDataParallelConfig(**WAYS[way]), dtype)
    for _ in range(3):
        loop(pair, freezes)
    for model in (pair.g, pair.d):
        model.wait_for_params()
    return pair.parameters()


@pytest.mark.parametrize(
    ("loop", "way"),
    slow_but(
        [(loop, way) for number, loop in enumerate(LOOPS) for way in list(WAYS)[number % 2 :: 2]],
        itertools.product(LOOPS, WAYS),
        [f"{loop.__name__}-{way}" for loop in LOOPS for way in WAYS],
    ),
)
def test_two_models_are_trained_in_turn(loop, way):
    plain = Pair(None, None, torch.float32)
    for _ in range(3):
        loop(plain, freezes=False)
    found = trained(SOLO, loop, way, torch.float32, freezes=False)
    assert all(map(torch.equal, found, plain.parameters()))
    for dtype in (torch.float32, torch.bfloat16):
        results = [
            run_ranks(2, lambda group, freezes=freezes: trained(group, loop, way, dtype, freezes))  # noqa: B023
            for freezes in (False, True)
        ]
        for one, other in zip(*results, strict=True):
            assert all(map(torch.equal, one, other))
        assert all(map(torch.equal, *results[0]))


@pytest.mark.parametrize("way", WAYS)
def test_a_late_gradient_starts_no_collective(way):
    def run(group):
        pair = Pair(group, DistributedDataParallelConfig(**WAYS[way]), torch.float32)
        discriminator_first(pair, freezes=False)
        issued = []
        for bucket_group in pair.d.engine.groups():
            bucket_group.start_grad_sync = lambda *unused: issued.append(unused)
        pair.loss_of_g().backward()
        assert not issued
        assert all(param.grad is None for param in pair.modules[1].parameters())
        with pytest.raises(GradientError, match=r"zero_grad\(\) must be called before another step"):
            pair.of_d.step()

    run_ranks(2, run)


@pytest.mark.parametrize("way", WAYS)
def test_another_late_gradient_is_refused_with_the_remedy(way):
    pair = Pair(SOLO, DistributedDataParallelConfig(**WAYS[way]), torch.float32)
    pair.of_d.zero_grad()
    pair.loss_of_d().backward()
    pair.d.finish_grad_sync()
    with pytest.raises(GradientError, match=r"call requires_grad_\(False\) of the model while a loss of another one"):
        pair.loss_of_g().backward()
