"""A parameter for which no rank has a gradient stays as it is, as without a wrapper."""

import contextlib
import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trackbed import megatron
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import GradientError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.grads.automatic_reduction import lacked_by_all
from trackbed.grads.collectives import SoloCollectives
from trackbed.optim import DataParallelOptimizer

WAYS = {
    "default": {},
    "overlap": {"overlap_grad_reduce": True, "bucket_size": 3},
    "sharded": {"use_distributed_optimizer": True},
    "sharded, overlap": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 3,
    },
}
TYPES = [torch.float32, torch.bfloat16]
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.5),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.5),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5, weight_decay=0.1),
}


class Parts(nn.Module):
    """Layers of which a step uses some."""

    def __init__(self, dtype, num_parts=3):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(2, 2, generator=generator).to(dtype) for _ in range(num_parts))

    def forward(self, used, factor=1.0):
        return sum(self.parts[number].sum() * factor * (number + 1) for number in used)


def wrap(group, module, way, optimizer_name="AdamW", **arguments):
    config = DistributedDataParallelConfig(**WAYS[way])
    model = DistributedDataParallel(module, config, process_group=group, allow_unused="overlap" in way, **arguments)
    return model, DataParallelOptimizer(OPTIMIZERS[optimizer_name](module.parameters()), model)


def expected(dtype, optimizer_name, used_of_ranks_by_step):
    """Parameters and states after steps of torch's optimizer with the mean of the ranks' gradients."""
    module = Parts(dtype)
    mains = [nn.Parameter(part.detach().float()) for part in module.parts]
    optimizer = OPTIMIZERS[optimizer_name](mains)
    for of_ranks in used_of_ranks_by_step:
        for number, main in enumerate(mains):
            count = sum(number in used for used in of_ranks)
            gradient = torch.full((2, 2), float(number + 1) * count, dtype=dtype) / len(of_ranks)
            main.grad = gradient.float() if count else None
        optimizer.step()
    return [main.detach().to(dtype) for main in mains], [optimizer.state.get(main, {}) for main in mains]


STEPS = [[(0,), (0, 1)], [(0, 1), (0,)], [(0,), (0,)], [(0, 2), (2,)], [(1,), (1,)]]
"""Parts that each of two ranks uses, step by step. None uses the last one at first."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_without_a_gradient_on_any_rank_is_left_alone(way, dtype, size):
    for optimizer_name in OPTIMIZERS:

        def run(group, optimizer_name=optimizer_name):
            model, optimizer = wrap(group, Parts(dtype), way, optimizer_name)
            for of_ranks in STEPS:
                optimizer.zero_grad()
                model(of_ranks[group.rank]).backward()
                optimizer.step()
            model.wait_for_params()
            return [part.detach().clone() for part in model.module.parts], optimizer.full_state_dict()["state"]

        params, states = expected(dtype, optimizer_name, [of_ranks[:size] for of_ranks in STEPS])
        for found, found_states in run_ranks(size, run):
            for number, (one, other) in enumerate(zip(found, params, strict=True)):
                assert torch.equal(one, other), (optimizer_name, number)
                own = found_states.get(f"parts.{number}", {})
                assert {key for key in own if key != "main_param"} == set(states[number])
                for key, value in states[number].items():
                    assert torch.equal(own[key], value), (optimizer_name, number, key)


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_the_program_writes_counts_also_where_the_ranks_add_up_to_zero(way):
    def run(group):
        model, optimizer = wrap(group, Parts(torch.float32), way)
        before = [part.detach().clone() for part in model.module.parts]
        optimizer.zero_grad()
        model.module.parts[1].main_grad.fill_(1.0 if group.rank == 0 else -1.0)
        model((0,)).backward()
        optimizer.step()
        model.wait_for_params()
        return [not torch.equal(*pair) for pair in zip(before, model.module.parts, strict=True)]

    assert run_ranks(2, run) == [[True, True, False]] * 2


@pytest.mark.parametrize("way", ["default", "sharded"])
def test_a_gradient_that_the_program_writes_after_the_reduction_is_used(way):
    model, optimizer = wrap(SOLO, Parts(torch.float32), way)
    before = model.module.parts[1].detach().clone()
    model((0,)).backward()
    model.finish_grad_sync()
    model.module.parts[1].main_grad.fill_(1.0)
    optimizer.step()
    assert not torch.equal(before, model.module.parts[1])


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_zero_that_a_backward_pass_brings_counts(way):
    model, optimizer = wrap(SOLO, Parts(torch.float32), way)
    before = model.module.parts[0].detach().clone()
    model((0,), 0.0).backward()
    optimizer.step()
    model.wait_for_params()
    assert torch.equal(model.module.parts[0], before * (1 - 0.1 * 0.5))


class Ignoring(torch.autograd.Function):
    """Returns no gradient for its second input."""

    @staticmethod
    def forward(ctx, inputs, ignored):
        return inputs * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_for_which_a_function_of_autograd_returns_none_is_left_alone(way):
    model, optimizer = wrap(SOLO, Parts(torch.float32), way)
    before = model.module.parts[1].detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        Ignoring.apply(model.module.parts[0], model.module.parts[1]).sum().backward()
        optimizer.step()
    model.wait_for_params()
    assert torch.equal(before, model.module.parts[1])
    assert set(optimizer.full_state_dict()["state"]) == {"parts.0"}


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_an_earlier_micro_batch_counts(way):
    def run(group):
        model, optimizer = wrap(group, Parts(torch.float32), way)
        before = [part.detach().clone() for part in model.module.parts]
        with model.no_sync() if group.rank == 1 else contextlib.nullcontext():
            if group.rank == 1:
                model((1,)).backward()
        model((0,)).backward()
        optimizer.step()
        model.wait_for_params()
        return [not torch.equal(*pair) for pair in zip(before, model.module.parts, strict=True)]

    assert run_ranks(2, run) == [[True, True, False]] * 2


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_any_gradient_changes_nothing(way):
    model, optimizer = wrap(SOLO, Parts(torch.float32), way)
    before = copy.deepcopy(list(model.module.parts))
    for _ in range(2):
        optimizer.zero_grad()
        assert optimizer.step().norm == 0.0
    model.wait_for_params()
    assert all(map(torch.equal, before, model.module.parts))
    assert not optimizer.optimizer.state


@pytest.mark.parametrize("way", WAYS)
def test_experts_are_left_alone_where_the_ranks_that_share_them_have_no_gradient(way):
    def run(group):
        module = Parts(torch.float32)
        for part in module.parts[1:]:
            part.allreduce = False
        model, optimizer = wrap(group, module, way, expert_process_group=SOLO)
        before = [part.detach().clone() for part in module.parts]
        optimizer.zero_grad()
        if group.rank < 3:
            model(((0, 1), (0, 1, 2), (0,))[group.rank]).backward()
        optimizer.step()
        model.wait_for_params()
        return [not torch.equal(*pair) for pair in zip(before, module.parts, strict=True)]

    assert run_ranks(4, run) == [[True, True, False], [True, True, True], [True, False, False], [True, False, False]]


@pytest.mark.parametrize("way", WAYS)
def test_code_for_megatron_keeps_zeros_and_decay(way):
    module = Parts(torch.float32)
    config = megatron.DistributedDataParallelConfig(**WAYS[way])
    model = megatron.DistributedDataParallel(None, config, module, process_group=SOLO, allow_unused=True)
    optimizer = DataParallelOptimizer(OPTIMIZERS["AdamW"](module.parameters()), model)
    before = module.parts[1].detach().clone()
    optimizer.zero_grad()
    model((0,)).backward()
    optimizer.step()
    model.wait_for_params()
    assert torch.equal(module.parts[1], before * (1 - 0.1 * 0.5))
    assert "parts.1" in optimizer.full_state_dict()["state"]


def test_with_overlap_and_without_allow_unused_it_stays_an_error():
    module = Parts(torch.float32)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**WAYS["overlap"]), process_group=SOLO)
    optimizer = DataParallelOptimizer(OPTIMIZERS["AdamW"](module.parameters()), model)
    model((0,)).backward()
    with pytest.raises(GradientError, match=r"but parts\.2 in bucket 0 has none"):
        optimizer.step()


def test_a_parameter_that_was_reduced_automatically_before_the_optimizer_came_counts():
    def run(group):
        module = Parts(torch.float32)
        model = DistributedDataParallel(module, process_group=group)
        before = [part.detach().clone() for part in module.parts]
        model((0,) if group.rank == 0 else (1,)).backward()
        optimizer = DataParallelOptimizer(OPTIMIZERS["AdamW"](module.parameters()), model)
        optimizer.step()
        return [not torch.equal(*pair) for pair in zip(before, module.parts, strict=True)]

    assert run_ranks(2, run) == [[True, True, False]] * 2


@pytest.mark.parametrize("has_overlap", [False, True])
def test_torchs_own_optimizer_finds_none_where_no_rank_has_a_gradient(has_overlap):
    def run(group):
        module = Parts(torch.float32)
        config = DistributedDataParallelConfig(overlap_grad_reduce=has_overlap, bucket_size=3)
        model = DistributedDataParallel(module, config, process_group=group, allow_unused=True)
        model((0,) if group.rank == 0 else (1,)).backward()
        return [part.grad is not None for part in module.parts]

    assert run_ranks(2, run) == [[True, True, False]] * 2


class Counting(SoloCollectives):
    """Counts the exchanges of a rank."""

    exchanges = 0

    def exchange(self, numbers, **options):
        type(self).exchanges += 1
        return super().exchange(numbers, **options)


@pytest.mark.parametrize(("used", "count"), [((0, 1, 2), 1), ((0,), 2)])
def test_a_step_exchanges_once_unless_gradients_are_missing(used, count):
    model, optimizer = wrap(SOLO, Parts(torch.float32), "default")
    collectives = model.engine.dense.collectives = Counting()
    optimizer.zero_grad()
    model(used).backward()
    type(collectives).exchanges = 0
    optimizer.step()
    assert type(collectives).exchanges == count


@given(st.data())
def test_the_parameters_that_all_ranks_lack_are_those_in_each_of_their_lists(data):
    num_params = data.draw(st.integers(1, 3000))
    lists = data.draw(st.lists(st.sets(st.integers(0, num_params - 1), max_size=5).map(sorted), min_size=1, max_size=4))
    counts = np.array([len(one) for one in lists])
    sent = []

    def words_of(numbers):
        words = []
        lacked_by_all(numbers, np.ones(1), num_params, lambda own, label: words.append(own) or own[np.newaxis])
        return words

    words = [words_of(one) for one in lists]

    def exchange(own, label):
        assert len(own) <= 32
        sent.append(own)
        return np.stack([of_rank[len(sent) - 1] for of_rank in words])

    everywhere = sorted(set.intersection(*map(set, lists)))
    assert lacked_by_all(lists[0], counts, num_params, exchange) == everywhere
    assert bool(sent) == all(map(len, lists))


def test_steps_that_leave_parameters_alone_continue_from_each_state():
    for way, other in itertools.product(WAYS, WAYS):
        model, optimizer = wrap(SOLO, Parts(torch.float32), way)
        model((0,)).backward()
        optimizer.step()
        model.wait_for_params()
        module = Parts(torch.float32)
        module.load_state_dict(model.state_dict())
        new_model, new = wrap(SOLO, module, other)
        new.load_full_state_dict(optimizer.full_state_dict())
        for one, its_optimizer in ((model, optimizer), (new_model, new)):
            its_optimizer.zero_grad()
            one((0, 1)).backward()
            its_optimizer.step()
            one.wait_for_params()
        assert all(map(torch.equal, model.module.parts, module.parts))


@pytest.mark.parametrize("way", WAYS)
def test_a_fused_sgd_trains_a_parameter_that_gets_its_first_gradient_later_than_others(way):
    """torch's kernel takes the momentum of all parameters, or of none."""
    found = {}
    for is_fused in (False, True):
        module = Parts(torch.float32)
        config = DistributedDataParallelConfig(**WAYS[way])
        model = DistributedDataParallel(module, config, process_group=SOLO, allow_unused=True)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, fused=is_fused)
        optimizer = DataParallelOptimizer(sgd, model)
        for used in ((0,), (0, 1), (1, 2), (0, 1, 2)):
            optimizer.zero_grad()
            model(used).backward()
            optimizer.step()
        model.wait_for_params()
        found[is_fused] = [part.detach().clone() for part in module.parts]
    for one, other in zip(found[False], found[True], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
