"""Each row of the table in docs/how-to/move-from-pytorch.md is a test."""

import contextlib
import copy
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import trackbed
from tests.grads.crossing import OPERATIONS, training
from tests.support.models.default_device import needs_steps_on_cpu
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CollectiveError, GradientError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "move-from-pytorch.md"
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 5}
SHARDED = {"use_distributed_optimizer": True}
ALL = SHARDED | OVERLAP | {"overlap_param_gather": True}
TESTS = {}


def row(case):
    """Makes a function the test of a row of the table."""

    def add(function):
        TESTS[case] = function
        return function

    return add


def rows():
    table = PAGE.read_text().split("## What works, is refused, or differs")[1].split("## What you gain")[0]
    return re.findall(r"^\| (.*?) \| (works|refused|differs) \|", table, re.MULTILINE)


def wrap(module, config=None, group=SOLO, make=torch.optim.AdamW, allow_unused=False, **options):
    wrapper = DistributedDataParallel(
        module, DistributedDataParallelConfig(**config or {}), process_group=group, allow_unused=allow_unused
    )
    return wrapper, DataParallelOptimizer(make(module.parameters(), lr=0.1, **options), wrapper)


def step(wrapper, optimizer, loss=None):
    optimizer.zero_grad()
    dtype = next(wrapper.parameters()).dtype
    (wrapper(torch.ones(1, 2, dtype=dtype)).sum() if loss is None else loss()).backward()
    optimizer.step()
    wrapper.wait_for_params()


def layers(dtype=torch.float32):
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(dtype)


def turned_and_alone(config):
    conv = nn.Conv2d(3, 4, 2, bias=False).to(memory_format=torch.channels_last)
    alone = copy.deepcopy(conv.weight)
    factors = torch.randn(4, 3, 2, 2)
    adamw = torch.optim.AdamW([alone], lr=0.1, fused=True)
    wrapper, optimizer = wrap(conv, config, fused=True)
    for _ in range(3):
        adamw.zero_grad()
        (alone * factors).sum().backward()
        adamw.step()
        step(wrapper, optimizer, lambda: (conv.weight * factors).sum())
    return conv.weight, alone


@row("parameters in `channels_last` or transposed, also with `fused=True`, not sharded")
def turned_parameters():
    for config in ({}, OVERLAP):
        weight, alone = turned_and_alone(config)
        assert torch.equal(weight, alone)
        assert weight.main_grad.stride() == weight.stride() == alone.stride()


@row("the same, sharded")
def turned_parameters_sharded():
    for config in (SHARDED, ALL):
        weight, alone = turned_and_alone(config)
        torch.testing.assert_close(weight, alone, rtol=1e-6, atol=1e-6)
        assert weight.is_contiguous()


@row("a parameter with gaps or overlaps, and `fused=True`")
def gaps():
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2, 6)[:, ::2])
    with pytest.raises(ArgumentError, match="weight must fill its memory"):
        wrap(module, fused=True)
    wrap(module, fused=False)


def unused(config, **options):
    module = layers()
    wrapper, optimizer = wrap(module, config, weight_decay=0.5, **options)
    before = module[1].weight.detach().clone()
    step(wrapper, optimizer, lambda: module[0](torch.ones(1, 2)).sum())
    return torch.equal(before, module[1].weight) and set(optimizer.full_state_dict()["state"]) == {"0.weight", "0.bias"}


@row("a parameter that no rank has used")
def unused_parameters():
    assert all(unused(config) for config in ({}, SHARDED))
    assert all(unused(config, allow_unused=True) for config in (OVERLAP, ALL))


@row("the same with `overlap_grad_reduce`, without `allow_unused=True`")
def unused_parameters_with_overlap():
    with pytest.raises(GradientError, match=r"but 1\.bias in bucket 0"):
        unused(OVERLAP)


@row("weights loaded into a part of a 16-bit model, or written by `copy_`")
def loads_of_parts():
    for config in ({}, ALL):
        module = layers(torch.bfloat16)
        wrapper, optimizer = wrap(module, config, make=torch.optim.SGD)
        optimizer.param_groups[0]["lr"] = 0.0
        module[0].load_state_dict({"weight": torch.full((2, 2), 3.0), "bias": torch.zeros(2)})
        with torch.no_grad():
            module[1].weight.copy_(torch.full((2, 2), 5.0))
        step(wrapper, optimizer)
        assert module[0].weight.tolist() == [[3.0] * 2] * 2
        assert module[1].weight.tolist() == [[5.0] * 2] * 2


def mains(optimizer):
    return {name: state["main_param"].clone() for name, state in optimizer.full_state_dict()["state"].items()}


@row("16-bit weights exchanged for an evaluation, and put back")
def exchanged_weights():
    for config in ({}, ALL):
        wrapper, optimizer = wrap(layers(torch.bfloat16), config)
        step(wrapper, optimizer)
        before, kept = mains(optimizer), copy.deepcopy(wrapper.state_dict())
        wrapper.load_state_dict({name: torch.zeros_like(value) for name, value in kept.items()})
        wrapper.load_state_dict(kept)
        optimizer.optimizer.param_groups[0].update(lr=0.0)
        step(wrapper, optimizer)
        assert all(torch.equal(value, before[name]) for name, value in mains(optimizer).items())


@row("16-bit weights written through `param.data`, a NumPy array or `torch.distributed`")
def weights_written_through_data():
    wrapper, optimizer = wrap(layers(torch.bfloat16))
    wrapper.module[0].weight.data.fill_(3.0)
    assert set(mains(optimizer)["0.weight"].flatten().tolist()) != {3.0}
    optimizer.reload_model_params()
    assert set(mains(optimizer)["0.weight"].flatten().tolist()) == {3.0}


@row("a parameter written through an old reference while it is gathered")
def writes_while_gathered():
    def run(group):
        wrapper, optimizer = wrap(layers(), ALL, group)
        weight = wrapper.module[0].weight
        wrapper(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            weight.add_(1)
        with pytest.raises(GradientError, match=r"0\.weight was written through an old reference"):
            wrapper.wait_for_params()

    run_ranks(2, run)


class Sums(torch.optim.SGD):
    """Keeps a sum in float64, and a count."""

    is_elementwise = True

    def step(self):
        super().step()
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            state["sum"] = state.get("sum", torch.zeros_like(param, dtype=torch.float64)) + param.grad / 3
            state["count"] = torch.full_like(param, 2**40 + 1, dtype=torch.int64)
            state["mask"] = param > 0


@row("states in float64, integers or bools")
def types_of_states():
    for config in ({}, ALL):
        wrapper, optimizer = wrap(layers(), config, make=Sums)
        step(wrapper, optimizer)
        full = optimizer.state_dict()
        optimizer.load_state_dict(full)
        for key, value in optimizer.state_dict()["state"]["0.weight"].items():
            assert torch.equal(value, full["state"]["0.weight"][key])
            assert value.dtype == full["state"]["0.weight"][key].dtype


@row("a float64 state for torch's own optimizer, which would be rounded")
def states_that_would_be_rounded():
    wrapper, optimizer = wrap(layers())
    step(wrapper, optimizer)
    state = optimizer.full_state_dict()
    state["state"]["0.bias"]["exp_avg"] = torch.full((2,), 1 / 3, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"'exp_avg' of 0\.bias must be of torch\.float32, as AdamW needs it"):
        optimizer.load_full_state_dict(state)
    optimizer.load_full_state_dict(state, allow_cast=True)


def adversaries(config):
    return [wrap(layers(), config) for _ in range(2)]


@row("the loss of a generator, computed through the discriminator after the `step()` of that")
def adversarial_training():
    for config in ({}, OVERLAP, SHARDED, ALL):
        (g, of_g), (d, of_d) = adversaries(config)
        for _ in range(3):
            step(d, of_d, lambda: d(g(torch.ones(1, 2)).detach()).sum())  # noqa: B023
            before = copy.deepcopy(d.state_dict())
            step(g, of_g, lambda: -d(g(torch.ones(1, 2))).sum())  # noqa: B023
            assert all(torch.equal(value, before[name]) for name, value in d.state_dict().items())


@row("the same between `finish_grad_sync()` of the discriminator and its `step()`")
def other_late_gradients():
    (g, _), (d, of_d) = adversaries({})
    of_d.zero_grad()
    d(torch.ones(1, 2)).sum().backward()
    d.finish_grad_sync()
    with pytest.raises(GradientError, match=r"requires_grad_\(False\)"):
        d(g(torch.ones(1, 2))).sum().backward()


def two_of(module, first, second):
    return [first(module[0].parameters(), lr=0.1), second(module[1].parameters(), lr=0.1)]


@row("several optimizers for one model")
def several_optimizers():
    for config in ({}, ALL):
        module = layers()
        wrapper = DistributedDataParallel(module, DistributedDataParallelConfig(**config), process_group=SOLO)
        optimizer = DataParallelOptimizer(two_of(module, torch.optim.SGD, torch.optim.AdamW), wrapper)
        before = copy.deepcopy(wrapper.state_dict())
        step(wrapper, optimizer)
        assert not any(torch.equal(value, before[name]) for name, value in wrapper.state_dict().items())
    one, _ = (DataParallelOptimizer(each, wrapper) for each in two_of(module, torch.optim.SGD, torch.optim.SGD))
    with pytest.raises(GradientError, match="give several of torch as a list"):
        one.step()


@row("Muon, sharded")
def sharded_muon():
    module = nn.Linear(2, 2, bias=False)
    wrap(module, make=torch.optim.Muon)
    with pytest.raises(ArgumentError, match="not known of Muon"):
        wrap(module, SHARDED, make=torch.optim.Muon)


@row("a look at `adamw.state[parameter]`")
def looks_at_states():
    for config in ({}, ALL):
        wrapper, optimizer = wrap(layers(), config)
        assert optimizer.optimizer.state[wrapper.module[0].weight] == {}
        optimizer.state_dict()
        step(wrapper, optimizer)
        assert len(optimizer.full_state_dict()["state"]) == 4


def keeping(values):
    class Keeping(torch.optim.SGD):
        is_elementwise = True

        def step(self):
            super().step()
            for param in self.param_groups[0]["params"]:
                self.state[param].update(values)
            self.state["count"] = 3

    return Keeping


@row("infinity, NaN, tuples, dictionaries and large integers in a state")
def values_in_states():
    values = {"a": math.inf, "b": (1, 2), "c": {"d": [None]}, "e": 2**80}
    for config in ({}, ALL):
        wrapper, optimizer = wrap(layers(), config, make=keeping(values | {"nan": math.nan}))
        step(wrapper, optimizer)
        found = optimizer.full_state_dict()["state"]["0.weight"]
        assert math.isnan(found.pop("nan"))
        assert {key: found[key] for key in values} == values


@row("tensors of several elements inside a list in a state, sharded")
def tensors_in_lists():
    for config, refusal in (({}, contextlib.nullcontext()), (SHARDED, pytest.raises(ArgumentError, match="'list' of"))):
        wrapper, optimizer = wrap(layers(), config, make=keeping({"list": [torch.ones(2)]}))
        step(wrapper, optimizer)
        with refusal:
            optimizer.full_state_dict()


@row("a tensor in a state that has not the shape of the parameter")
def tables_in_states():
    table = torch.arange(10.0).view(5, 2)
    for config in ({}, ALL):
        wrapper, optimizer = wrap(layers(), config, make=keeping({"table": table}))
        step(wrapper, optimizer)
        other = wrap(layers(), config, make=keeping({}))[1]
        other.load_full_state_dict(optimizer.full_state_dict())
        assert torch.equal(other.full_state_dict()["state"]["0.weight"]["table"], table)


@row("a state under a key that is no parameter")
def other_keys():
    for config in ({}, ALL):
        wrapper, optimizer = wrap(layers(), config, make=keeping({}))
        step(wrapper, optimizer)
        other = wrap(layers(), config, make=keeping({}))[1]
        other.load_full_state_dict(optimizer.full_state_dict())
        assert other.optimizer.state["count"] == 3


@row("two models that share a module or a parameter, each wrapped")
def common_parts():
    part = nn.Linear(2, 2)
    kept = wrap(nn.Sequential(part, nn.Linear(2, 2)))
    with pytest.raises(ArgumentError, match=r"but 0\.weight is in another DistributedDataParallel"):
        wrap(nn.Sequential(part, nn.Linear(2, 3)))
    step(*kept)


@row("a wrapper inside a model that is wrapped")
def nested_wrappers():
    inner = DistributedDataParallel(nn.Linear(2, 2), process_group=SOLO)
    with pytest.raises(ArgumentError, match="but 0 is in Trackbed's DistributedDataParallel"):
        wrap(nn.Sequential(inner))


@row("`torch.set_default_device`")
def default_device(tmp_path):
    needs_steps_on_cpu()
    module = layers()
    with torch.device("meta"):
        wrapper, optimizer = wrap(module, ALL)
        step(wrapper, optimizer, lambda: module[0].weight.sum() + sum(param.sum() for param in module.parameters()))
        trackbed.save(trackbed.sharded_state(wrapper, optimizer), tmp_path / "state")
        trackbed.load_sharded_state(tmp_path / "state", wrapper, optimizer)


@row("ranks at different calls inside `guarded()`, such as a save and a step")
def different_calls(tmp_path):
    def work(group):
        with training(tmp_path, group) as run:
            OPERATIONS["save" if group.rank == 0 else "step"](run)

    with pytest.raises(CollectiveError, match="rank 0 waits at save, and rank 1 waits at reduction of gradients"):
        run_ranks(2, work)


@pytest.mark.parametrize(("case", "outcome"), rows())
def test_a_row_of_the_table_is_as_it_says(case, outcome, tmp_path):
    test = TESTS[case]
    test(tmp_path) if test.__code__.co_argcount else test()


def test_each_test_is_a_row():
    assert set(TESTS) == {case for case, _ in rows()}
