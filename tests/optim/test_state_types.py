"""Tensors of a state keep their types in every load, unless torch's optimizer needs another."""

import copy

import pytest
import torch
from torch import nn

import trackbed
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


class Many(torch.optim.Optimizer):
    """Sums in float64, counts, masks, and a state in each further type."""

    is_elementwise = True

    def __init__(self, params, lr=0.1):
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
                    state["count"] = torch.full_like(param, 2**53 + 1, dtype=torch.int64)
                    state["mask"] = torch.zeros_like(param, dtype=torch.bool)
                    state["byte"] = torch.zeros_like(param, dtype=torch.uint8)
                    state["half"] = torch.zeros_like(param, dtype=torch.float16)
                    state["scalar"] = torch.tensor(0.1, dtype=torch.float64)
                    state["number"] = torch.tensor(2**62 + 1)
                state["sum"] += param.grad.double() * 0.1
                state["count"] += 1
                state["mask"] |= param.grad > 0
                state["byte"] += 1
                state["half"] += param.grad.to(torch.float16)
                state["scalar"] *= 1.1
                param.sub_((group["lr"] * state["sum"]).to(param.dtype))


def wrap(group, dtype, config, kind=Many, **options):
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    module = module.to_empty(device="cpu").to(dtype)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.arange(param.numel()).view(param.shape) / 7)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**config), process_group=group)
    return model, DataParallelOptimizer(kind(module.parameters(), **options), model)


def step(model, optimizer, number):
    optimizer.zero_grad()
    dtype = model.module.weight.dtype
    (model(torch.full((1, 3), number / 3, dtype=dtype)).sum() / 7).backward()
    optimizer.step()
    model.wait_for_params()


def reload(load, old, new, folder):
    """Loads the state of one model and optimizer into others."""
    model, optimizer = old
    other_model, other = new
    if load == "sharded":
        trackbed.save(trackbed.sharded_state(model, optimizer), folder, group=model.dp_group.group)
        trackbed.load_sharded_state(folder, other_model, other)
        return
    other_model.load_state_dict(model.state_dict())
    if load == "full":
        other.load_full_state_dict(optimizer.full_state_dict())
    elif load == "split":
        state, parts = optimizer.split_state_dict()
        tensors = {}
        for part in parts:
            tensors.setdefault(part.name, {})[part.key] = part.value.reshape(-1)
        other.load_split_state_dict(state, tensors)


@pytest.mark.parametrize("config", [{}, SHARDED])
@pytest.mark.parametrize("load", ["full", "split", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_resumed_run_has_the_bits_and_types_of_one_that_was_not_interrupted(dtype, load, config, tmp_path):
    def run(group):
        old, new = wrap(group, dtype, config), wrap(group, dtype, config)
        step(*old, 1)
        step(*old, 2)
        reload(load, old, new, tmp_path / "state")
        for pair in (old, new):
            step(*pair, 3)
        for one, other in zip(old[0].module.parameters(), new[0].module.parameters(), strict=True):
            assert torch.equal(one, other)
        states = old[1].full_state_dict()["state"], new[1].full_state_dict()["state"]
        for name, state in states[0].items():
            for key, value in state.items():
                found = states[1][name][key]
                becomes_wide = key == "half" and dtype == torch.bfloat16
                assert found.dtype == (torch.float32 if becomes_wide else value.dtype), (name, key)
                assert torch.equal(found.to(value.dtype), value), (name, key)

    run_ranks(2, run)


def test_a_state_that_was_there_before_wrapping_keeps_its_types():
    module = nn.Linear(3, 3)
    many = Many(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    many.step()
    before = {key: value.dtype for key, value in many.state[module.weight].items()}
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**SHARDED), process_group=SOLO)
    optimizer = DataParallelOptimizer(many, model)
    found = optimizer.full_state_dict()["state"]["weight"]
    assert {key: value.dtype for key, value in found.items()} == before


TORCHS = [(torch.optim.AdamW, "exp_avg"), (torch.optim.SGD, "momentum_buffer"), (torch.optim.Adagrad, "sum")]
MORE = {torch.optim.SGD: {"momentum": 0.9}}


def torchs_state(kind, key, value):
    model, optimizer = wrap(SOLO, torch.float32, {}, kind, lr=0.1, **MORE.get(kind, {}))
    step(model, optimizer, 1)
    state = optimizer.full_state_dict()
    state["state"]["weight"][key] = torch.full((3, 3), value, dtype=torch.float64)
    return state


@pytest.mark.parametrize("config", [{}, SHARDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "key"), TORCHS)
def test_torchs_optimizer_refuses_a_state_that_would_be_rounded_unless_allow_cast(kind, key, dtype, config):
    model, optimizer = wrap(SOLO, dtype, config, kind, lr=0.1, **MORE.get(kind, {}))
    before = copy.deepcopy(optimizer.full_state_dict())
    text = rf"'{key}' of weight must be of torch.float32, as {kind.__name__} needs it, but is of torch.float64"
    with pytest.raises(ArgumentError, match=text):
        optimizer.load_full_state_dict(torchs_state(kind, key, 1 / 3))
    assert optimizer.full_state_dict()["state"].keys() == before["state"].keys()
    optimizer.load_full_state_dict(torchs_state(kind, key, 1 / 3), allow_cast=True)
    found = optimizer.full_state_dict()["state"]["weight"][key]
    assert torch.equal(found, torch.full((3, 3), 1 / 3))
    optimizer.load_full_state_dict(torchs_state(kind, key, 0.25))
    step(model, optimizer, 1)


@pytest.mark.parametrize("config", [{}, SHARDED])
def test_a_full_state_and_a_sharded_one_are_refused_alike(config, tmp_path):
    model, optimizer = wrap(SOLO, torch.float64, config, torch.optim.AdamW)
    step(model, optimizer, 1)
    new_model, new = wrap(SOLO, torch.float32, config, torch.optim.AdamW)
    with pytest.raises(ArgumentError, match="pass allow_cast=True to round them"):
        new.load_state_dict(optimizer.state_dict())
    new.load_state_dict(optimizer.state_dict(), allow_cast=True)
    trackbed.save({**trackbed.sharded_state(model, optimizer), **trackbed.sharded_state(new_model)}, tmp_path / "state")
    with pytest.raises(CheckpointError, match="pass allow_cast=True to round them"):
        trackbed.load_sharded_state(tmp_path / "state", new_model, new)
    trackbed.load_sharded_state(tmp_path / "state", new_model, new, allow_cast=True)
    assert new.full_state_dict()["state"]["weight"]["exp_avg"].dtype == torch.float32


def test_states_of_16_bits_become_float32_beside_float32_copies_and_stay_beside_float32_parameters():
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        model, optimizer = wrap(SOLO, dtype, {})
        step(model, optimizer, 1)
        state = optimizer.full_state_dict()
        state["state"]["weight"]["half"] = state["state"]["weight"]["half"].to(torch.float16)
        optimizer.load_full_state_dict(state)
        assert optimizer.full_state_dict()["state"]["weight"]["half"].dtype == expected


def test_the_state_of_an_optimizer_with_factors_of_matrices_is_loaded():
    model, optimizer = wrap(SOLO, torch.float32, {}, torch.optim.Adafactor)
    step(model, optimizer, 1)
    new_model, new = wrap(SOLO, torch.float32, {}, torch.optim.Adafactor)
    reload("full", (model, optimizer), (new_model, new), None)
    for pair in ((model, optimizer), (new_model, new)):
        step(*pair, 2)
    assert torch.equal(model.module.weight, new_model.module.weight)
