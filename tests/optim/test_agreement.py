"""Ranks whose updates would differ are refused in the first step that they do."""

import pytest
import torch

from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError
from trackbed.optim import DataParallelOptimizer
from trackbed.optim.agreement import describe_options
from wrapped import backward, layers, wrap

GATHER = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 10,
}
WAYS = [{}, {"overlap_grad_reduce": True}, GATHER]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def step(wrapper, optimizer):
    optimizer.zero_grad()
    backward(wrapper, 0)
    return optimizer.step()


def other_rate(optimizer, model):
    optimizer.param_groups[0]["lr"] = 0.5


def other_betas(optimizer, model):
    optimizer.param_groups[0]["betas"] = (0.9, 0.95)


def freeze(optimizer, model):
    model[1].weight.requires_grad_(False)


CHANGES = {
    other_rate: r"the options of parameter groups must be the same on every rank, but rank \d has lr=",
    other_betas: r"the options of parameter groups must be the same on every rank, but rank \d has lr=",
    freeze: r"parameters that are frozen after wrapping must be the same .* but rank \d has (1\.weight|none), and rank",
}


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_that_changes_its_update_is_refused_before_anything_is_updated(change, options):
    def work(group):
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, allow_unused=True, **options)
        optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), wrapper)
        step(wrapper, optimizer)
        wrapper.wait_for_params()
        before = [param.detach().clone() for param in model.parameters()]
        if group.rank == 1:
            change(optimizer, model)
        with pytest.raises(CollectiveError, match=CHANGES[change]):
            step(wrapper, optimizer)
        for param, own in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.detach(), own)

    run_ranks(2, work)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda rank: {"max_norm": 1.0 + rank}, "max_norm must be the same on every rank, but rank"),
        (lambda rank: {"loss_scale": 1.0 + rank}, "the loss scale must be the same on every rank, but rank"),
        (lambda rank: {"reverse": rank == 2}, "the parameter groups must be the same on every rank, but rank"),
    ],
)
def test_ranks_that_build_other_optimizers_are_refused(build, words, options):
    def work(group):
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, **options)
        arguments = build(group.rank)
        params = list(model.parameters())[:: -1 if arguments.pop("reverse", False) else 1]
        optimizer = DataParallelOptimizer(torch.optim.AdamW(params), wrapper, **arguments)
        with pytest.raises(CollectiveError, match=words):
            step(wrapper, optimizer)

    run_ranks(3, work)


@pytest.mark.parametrize("options", WAYS)
def test_a_schedule_that_all_ranks_follow_is_no_difference(options):
    def work(group):
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, **options)
        inner = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1) if group.rank else 0.10000000149011612)
        optimizer = DataParallelOptimizer(inner, wrapper)
        inner.param_groups[0]["note"] = object()  # of no consequence
        for _ in range(3):
            step(wrapper, optimizer)
            inner.param_groups[0]["lr"] = inner.param_groups[0]["lr"] * 0.5

    run_ranks(2, work)


def test_options_are_described_as_numbers_and_words():
    options = {"params": [1], "lr": torch.tensor(0.5), "betas": (0.5, torch.tensor(0.25)), "foreach": None, "x": {}}
    assert describe_options(options) == "lr=0.5, betas=(0.5, 0.25), foreach=None"
