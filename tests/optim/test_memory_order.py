"""Fused optimizers, which walk memory, train parameters of any order in memory, also from each kind of state."""

import itertools

import pytest
import torch
from torch import nn

import trackbed
from trackbed import megatron
from trackbed.comm import SOLO
from trackbed.errors import ArgumentError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

WEIGHTS = {
    "channels_last": lambda: torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "channels_last of width 1": lambda: torch.randn(4, 3, 1, 1).contiguous(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 3, 2, 1, 2).contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda: torch.randn(5, 3).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "of a decomposition": lambda: torch.linalg.qr(torch.randn(5, 3))[0],
    "contiguous": lambda: torch.randn(3, 4),
}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam with amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
}
TYPES = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16 with float32 gradients": (torch.bfloat16, {"grad_reduce_in_fp32": True}),
    "float64": (torch.float64, {}),
}
LOADS = ("full", "sharded", "from torch")


class Net(nn.Module):
    """One parameter."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())


def alone(kind, options, weight, dtype, gradients):
    """The parameter, or its copy in float32, and its state after steps of torch's optimizer."""
    main = nn.Parameter(weight.clone().to(torch.float32 if dtype == torch.bfloat16 else dtype))
    optimizer = kind([main], lr=0.1, fused=True, **options)
    for gradient in gradients:
        main.grad = torch.empty_like(main).copy_(gradient)
        optimizer.step()
    return main.detach(), optimizer


def wrapped(kind, options, weight, config, form):
    module = Net(weight)
    if form == "torch":
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**config), process_group=SOLO)
    else:
        config = megatron.DistributedDataParallelConfig(**config)
        model = megatron.DistributedDataParallel(None, config, module, process_group=SOLO)
    return model, DataParallelOptimizer(kind(module.parameters(), lr=0.1, fused=True, **options), model)


def train(model, optimizer, gradients):
    weight = model.module.weight
    for gradient in gradients:
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        optimizer.step()


def row_major(state):
    """A state as files keep it."""
    if isinstance(state, torch.Tensor):
        return state.clone(memory_format=torch.contiguous_format)
    if isinstance(state, dict):
        return {key: row_major(value) for key, value in state.items()}
    return [row_major(value) for value in state] if isinstance(state, list) else state


@pytest.mark.parametrize("form", ["torch", "megatron"])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("weight_name", WEIGHTS)
def test_a_fused_optimizer_updates_each_element_with_its_own_gradient(weight_name, load, form, tmp_path):
    types = itertools.islice(itertools.cycle(TYPES.values()), list(WEIGHTS).index(weight_name), None)
    for number, (name, (dtype, config)) in enumerate(zip(OPTIMIZERS, types, strict=False)):
        kind, options = OPTIMIZERS[name]
        weight = WEIGHTS[weight_name]().to(dtype)
        gradients = [torch.randn(weight.shape).to(dtype) for _ in range(4)]
        main, torchs = alone(kind, options, weight, dtype, gradients)
        model, optimizer = wrapped(kind, options, weight, config, form)
        train(model, optimizer, gradients[:2])
        other_model, other = wrapped(kind, options, model.module.weight.detach(), config, form)
        if load == "full":
            other.load_full_state_dict(row_major(optimizer.full_state_dict()))
        elif load == "sharded":
            trackbed.save(trackbed.sharded_state(model, optimizer), tmp_path / f"{number}")
            trackbed.load_sharded_state(tmp_path / f"{number}", other_model, other)
        else:
            state = alone(kind, options, weight, dtype, gradients[:2])[1].state_dict()
            state["state"][0] |= row_major(optimizer.full_state_dict()["state"]["weight"])
            other.load_full_state_dict(row_major(state))
        train(other_model, other, gradients[2:])
        assert torch.equal(other_model.module.weight, main.to(dtype)), (name, dtype, config)
        found = other.full_state_dict()["state"]["weight"]
        for key, value in next(iter(torchs.state.values())).items():
            assert torch.equal(found[key], value), (name, dtype, config, key)
            assert found[key].stride() == value.stride()
        if dtype == torch.bfloat16:
            assert found["main_param"].stride() == weight.stride()


def test_the_state_of_a_frozen_parameter_has_the_strides_of_the_parameter():
    weight = torch.randn(5, 3).t()
    module = nn.ModuleList([Net(weight), Net(weight)])
    adamw = torch.optim.AdamW(module.parameters(), fused=True)
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    adamw.step()
    state = row_major(adamw.state_dict())
    module[1].requires_grad_(False)
    module[0].weight.grad = None
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(module, config, process_group=SOLO)
    optimizer = DataParallelOptimizer(torch.optim.AdamW(module.parameters(), fused=True), model)
    optimizer.load_full_state_dict(state)
    found = optimizer.full_state_dict()["state"]["1.weight"]
    assert found["exp_avg"].stride() == weight.stride()


SCATTERED = {
    "gaps": lambda: torch.randn(4, 6)[:, ::2],
    "overlaps": lambda: torch.randn(4, 1).expand(4, 3),
    "gaps in rows": lambda: torch.randn(4, 6).t()[::2],
}


@pytest.mark.parametrize("name", SCATTERED)
def test_a_fused_optimizer_of_a_parameter_with_gaps_or_overlaps_is_refused_by_name(name):
    module = nn.Module()
    module.weight = nn.Parameter(SCATTERED[name]())
    model = DistributedDataParallel(module, process_group=SOLO)
    with pytest.raises(ArgumentError, match=r"optimizer: weight must fill its memory for fused=True"):
        DataParallelOptimizer(torch.optim.AdamW(module.parameters(), fused=True), model)
    optimizer = DataParallelOptimizer(torch.optim.AdamW(module.parameters()), model)
    optimizer.param_groups[0]["fused"] = True
    with pytest.raises(ArgumentError, match="weight must fill its memory"):
        optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "config", "is_fused"),
    [
        (torch.float32, {}, False),
        (torch.bfloat16, {}, True),
        (torch.float32, {"use_distributed_optimizer": True}, True),
    ],
)
def test_a_parameter_with_gaps_is_trained_otherwise(dtype, config, is_fused):
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(4, 6).to(dtype)[:, ::2])
    before = module.weight.detach().clone()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**config), process_group=SOLO)
    main = nn.Parameter(before.float())
    adamw = torch.optim.AdamW([main], lr=0.1)
    optimizer = DataParallelOptimizer(torch.optim.AdamW(module.parameters(), lr=0.1, fused=is_fused), model)
    gradient = torch.randn(before.shape).to(dtype)
    for _ in range(2):
        main.grad = gradient.float()
        adamw.step()
        optimizer.zero_grad()
        (module.weight * gradient).sum().backward()
        optimizer.step()
    torch.testing.assert_close(module.weight.detach().float(), main.detach().to(dtype).float(), rtol=1e-5, atol=1e-5)
    optimizer.load_full_state_dict(optimizer.full_state_dict())
