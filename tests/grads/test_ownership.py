"""A parameter has one wrapper: parts that are wrapped already, and parts that two models share."""

import copy

import pytest
import torch
from torch import nn

from trackbed import megatron
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CollectiveError, GradientError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

WAYS = [{}, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}]


def wrap(module, way=WAYS[0], group=SOLO, form="torch"):
    if form == "torch":
        return DistributedDataParallel(module, DistributedDataParallelConfig(**way), process_group=group)
    config = megatron.DistributedDataParallelConfig(**way)
    return megatron.DistributedDataParallel(None, config, module, process_group=group)


def train(model, num_steps=2):
    optimizer = DataParallelOptimizer(torch.optim.SGD(model.module.parameters(), lr=0.1), model)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    model.wait_for_params()


def two_models():
    encoder = nn.Linear(2, 2)
    return nn.Sequential(encoder, nn.Linear(2, 1)), nn.Sequential(encoder, nn.Linear(2, 3))


@pytest.mark.parametrize("form", ["torch", "megatron"])
@pytest.mark.parametrize("way", WAYS)
def test_two_models_with_a_common_part_are_refused_at_the_second_construction(way, form):
    one, other = two_models()
    first = wrap(one, way, form=form)
    with pytest.raises(ArgumentError, match=r"module: a parameter must have one wrapper, but 0\.weight is in another"):
        wrap(other, way, form=form)
    train(first)  # it still has its model


def test_two_models_with_a_common_part_are_refused_on_every_rank():
    def run(group):
        one, other = two_models()
        first = wrap(one, group=group)
        with pytest.raises(CollectiveError, match=r"0\.weight is in another DistributedDataParallel"):
            wrap(other, group=group)
        train(first)

    run_ranks(2, run)


def test_a_model_and_a_part_of_it_are_refused_at_the_second_construction():
    one, _ = two_models()
    first = wrap(one)
    with pytest.raises(ArgumentError, match=r"but weight is in another DistributedDataParallel, with parameters"):
        wrap(one[0])
    train(first)


def test_a_model_is_wrapped_again_before_or_after_its_use():
    one, _ = two_models()
    for number in range(3):
        model = wrap(one)
        if number:
            train(model)
    kept = model
    one.append(nn.Linear(1, 2))
    train(wrap(one))
    one[0].requires_grad_(False)
    del model
    train(wrap(one))
    with pytest.raises(GradientError, match=r"its model was wrapped again: \S+ is in another .* must be used"):
        kept(torch.ones(1, 2))


@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_which_a_part_was_replaced_is_wrapped_again_before_its_use(way):
    one, _ = two_models()
    first = wrap(one, way)
    one[1] = nn.Linear(2, 5)
    second = wrap(one, way)
    train(second)
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = wrap(inner, way)
    inner[1] = nn.Linear(2, 2)
    train(wrap(Around(inner), way))
    del first, kept


@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_a_model_that_was_trained_is_wrapped_in_another_model(way):
    one, other = two_models()
    pretrained = wrap(one, way)
    train(pretrained)
    tuned = wrap(other, way)
    train(tuned)
    with pytest.raises(GradientError, match=r"its model was wrapped again: 0\.\w+ is in another"):
        pretrained(torch.ones(1, 2))


def test_a_model_whose_wrapper_was_dropped_shares_its_parts():
    one, other = two_models()
    wrap(one)
    train(wrap(other))


def test_a_common_part_that_the_other_model_freezes_is_shared():
    one, other = two_models()
    one[0].requires_grad_(False)
    first = wrap(one)
    one[0].requires_grad_(True)
    train(wrap(other))
    one[0].requires_grad_(False)
    train(first)


class Around(nn.Module):
    """A model with another inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(2, 2)

    def forward(self, inputs):
        return self.head(self.inner(inputs))


@pytest.mark.parametrize("form", ["torch", "megatron"])
@pytest.mark.parametrize("way", WAYS)
def test_a_wrapper_inside_a_model_is_refused_by_its_name(way, form):
    inner = wrap(nn.Linear(2, 2), way)
    for module, name in ((Around(inner), "inner"), (Around(nn.Sequential(nn.ReLU(), inner)), r"inner\.1")):
        with pytest.raises(ArgumentError, match=rf"but {name} is in Trackbed's .* put {name}\.module in its place"):
            wrap(module, way, form=form)
    train(inner)


def test_torchs_wrapper_inside_a_model_is_refused_by_its_name(process_group):
    inner = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), process_group=process_group)
    with pytest.raises(ArgumentError, match=r"but inner is in torch's DistributedDataParallel"):
        wrap(Around(inner))


@pytest.fixture
def process_group(tmp_path):
    """A process group of torch of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_a_wrapper_inside_a_model_whose_parameters_are_frozen_is_used():
    inner = wrap(nn.Linear(2, 2))
    train(inner)
    inner.module.requires_grad_(False)
    before = copy.deepcopy(inner.module.weight)
    train(wrap(Around(inner)))
    assert torch.equal(inner.module.weight, before)
