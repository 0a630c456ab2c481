"""Optimizers of programs, which do with tensors what torch's do not."""

import logging

import pytest
import torch

from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

LAYOUTS = [(dtype, sharded) for dtype in (torch.float32, torch.bfloat16) for sharded in (False, True)]


class Own(torch.optim.Optimizer):
    """Descends, in a way of its own."""

    is_elementwise = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)

    def update(self, param, group):
        param -= group["lr"] * param.grad


class Replacing(Own):
    """Gives parameters new memory."""

    def update(self, param, group):
        param.data = param.data - group["lr"] * param.grad


class Keeping(Own):
    """Keeps the last gradient itself."""

    def update(self, param, group):
        last = self.state[param].get("last", torch.zeros_like(param))
        param -= group["lr"] * (param.grad + 0.5 * last)
        self.state[param]["last"] = param.grad


class Listing(Own):
    """Keeps the list of its parameters, as torch's LBFGS."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.listed = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.listed:
            if param.grad is not None:
                self.update(param, self.param_groups[0])


class Counting(Own):
    """Counts steps in the groups of which it has parameters."""

    def update(self, param, group):
        group["step"] = group.get("step", 0) + 1
        super().update(param, group)


def new_model(dtype):
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2).to(dtype)


def train(kind, dtype, sharded, group=SOLO):
    model = new_model(dtype)
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    wrapper = DistributedDataParallel(model, config, process_group=group)
    optimizer = DataParallelOptimizer(kind([{"params": [one]} for one in model.parameters()]), wrapper)
    for step in range(4):
        optimizer.zero_grad()
        wrapper(torch.full((3, 4), 1.0 + step, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
    wrapper.wait_for_params()
    return [param.detach().clone() for param in model.parameters()], optimizer


def reference(kind, dtype):
    """A loop by hand, with copies in float32 of parameters of 16 bits."""
    model = new_model(dtype)
    copies = [torch.nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = kind([{"params": [one]} for one in copies])
    for step in range(4):
        model.zero_grad()
        model(torch.full((3, 4), 1.0 + step, dtype=dtype)).float().square().mean().backward()
        for copy, param in zip(copies, model.parameters(), strict=True):
            copy.grad = param.grad.float().clone()
        optimizer.step()
        with torch.no_grad():
            for copy, param in zip(copies, model.parameters(), strict=True):
                param.copy_(copy)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(("dtype", "sharded"), LAYOUTS)
@pytest.mark.parametrize("kind", [Own, Keeping, Counting])
def test_training_is_that_of_a_loop_by_hand(kind, dtype, sharded):
    assert all(map(torch.equal, train(kind, dtype, sharded)[0], reference(kind, dtype)))


@pytest.mark.parametrize(("dtype", "sharded"), LAYOUTS[1:])
def test_parameters_that_are_given_new_memory_come_back(dtype, sharded):
    """A whole parameter in float32 is the model's own: the next step refuses that it was replaced."""
    assert all(map(torch.equal, train(Replacing, dtype, sharded)[0], reference(Own, dtype)))


@pytest.mark.parametrize(("dtype", "sharded"), LAYOUTS)
def test_a_list_of_parameters_that_was_kept_has_what_is_updated(dtype, sharded):
    model = new_model(dtype)
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    wrapper = DistributedDataParallel(model, config, process_group=SOLO)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = DataParallelOptimizer(Listing(model.parameters()), wrapper)
    wrapper(torch.ones(3, 4, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    wrapper.wait_for_params()
    assert not any(map(torch.equal, before, model.parameters()))


def test_steps_may_be_counted_in_groups_of_which_a_rank_has_nothing():
    (first, _), (second, _) = run_ranks(2, lambda group: train(Counting, torch.float32, True, group))
    assert all(map(torch.equal, first, second))


class Keyed(Own):
    """Keeps a tensor of the parameter's shape under a key."""

    key = "step"

    def update(self, param, group):
        count = self.state[param].setdefault(self.key, torch.zeros_like(param))
        count += 1
        super().update(param, group)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_tensor_may_be_called_step(sharded):
    _, optimizer = train(Keyed, torch.float32, sharded)
    assert optimizer.state_dict()["state"]["weight"]["step"].tolist() == [[4.0] * 4] * 2


@pytest.mark.parametrize("key", ["main_param", ("m", 1), 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_keys_that_cannot_be_stored_are_refused(key, sharded):
    _, optimizer = train(type("Odd", (Keyed,), {"key": key}), torch.float32, sharded)
    with pytest.raises(ArgumentError, match=r"the keys of its states must be texts, and not 'main_param', .* that of"):
        optimizer.state_dict()


def test_a_state_dict_of_its_own_is_warned_of(caplog):
    class Wider(Own):
        def state_dict(self):
            return super().state_dict() | {"calls": 3}

    with caplog.at_level(logging.WARNING):
        train(Wider, torch.float32, False)
    assert "what state_dict() of Wider adds to a state is not stored" in caplog.text
