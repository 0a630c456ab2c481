"""A module around the wrapper loads its own state, and its own sharded state."""

import pytest
import torch
from torch import nn

import trackbed
from trackbed import DataParallelOptimizer, DistributedDataParallel, DistributedDataParallelConfig
from trackbed.comm import run_ranks
from trackbed.errors import ArgumentError
from trackbed.optim import load_sharded_state, sharded_state


class Nested(nn.Module):
    """A model with a part that is called as the wrapper calls its own."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.randn(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Noted(nn.Module):
    def __init__(self, note=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.note = note

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


MODELS = {
    "a layer": lambda: nn.Linear(2, 2),
    "several layers": lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2))),
    "a model with a module": Nested,
    "extra state": lambda: Noted("saved"),
    "a recurrent layer": lambda: nn.LSTM(2, 2),
    "attention": lambda: nn.MultiheadAttention(4, 2),
}


class Trainer(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.head = nn.Linear(2, 2)
        nn.init.ones_(self.head.weight)
        nn.init.zeros_(self.head.bias)


AROUND = {
    "a dictionary": lambda net: nn.ModuleDict({"net": net, "other": nn.Linear(2, 1)}),
    "a list": lambda net: nn.ModuleList([nn.Linear(1, 1), net]),
    "a module": Trainer,
    "a module in a module": lambda net: nn.ModuleDict({"a.b".replace(".", "_"): Trainer(net)}),
    "two wrappers": lambda net: nn.ModuleDict({"net": net, "average": DistributedDataParallel(nn.Linear(2, 2))}),
}


def built(model, around, **options):
    return AROUND[around](DistributedDataParallel(MODELS[model](), **options))


def assert_same(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("model", MODELS)
def test_a_module_around_the_wrapper_loads_its_own_state(model, around):
    old, new = built(model, around), built(model, around)
    state = old.state_dict()
    assert not any(".module.module" in name for name in state)
    assert new.load_state_dict(state).missing_keys == []
    assert_same(new.state_dict(), state)
    new = built(model, around)
    assert new.load_state_dict(dict(state)).unexpected_keys == []  # without versions
    assert_same(new.state_dict(), state)


@pytest.mark.parametrize("model", MODELS)
def test_the_names_are_those_of_the_model(model):
    trainer = built(model, "a module")
    assert {f"net.{name}" for name in MODELS[model]().state_dict()} < set(trainer.state_dict())


@pytest.mark.parametrize("model", MODELS)
def test_a_state_with_the_names_of_torchs_wrapper_is_loaded_as_before(model):
    old, new = built(model, "a module"), built(model, "a module")
    state = {name.replace("net.", "net.module.", 1): value for name, value in old.state_dict().items()}
    new.load_state_dict(state)
    assert_same(new.state_dict(), old.state_dict())


def test_a_state_of_a_module_without_a_wrapper_is_loaded():
    old, new = Trainer(nn.Linear(2, 2)), Trainer(DistributedDataParallel(nn.Linear(2, 2)))
    new.load_state_dict(old.state_dict())
    assert_same(new.state_dict(), old.state_dict())
    old.load_state_dict(new.state_dict())


def test_missing_and_unexpected_names_are_found():
    trainer = built("a layer", "a module")
    state = trainer.state_dict()
    del state["net.weight"]
    state["net.other"] = torch.ones(1)
    found = trainer.load_state_dict(state, strict=False)
    assert found.missing_keys == ["net.module.weight"]
    assert found.unexpected_keys == ["net.module.other"]
    with pytest.raises(RuntimeError, match=r"size mismatch for net\.module\.bias"):
        trainer.load_state_dict({**state, "net.bias": torch.ones(5)}, strict=False)


def test_parameters_cannot_be_replaced_through_an_outer_module():
    trainer = built("a layer", "a module")
    with pytest.raises(ArgumentError, match="assign must be False"):
        trainer.load_state_dict(trainer.state_dict(), assign=True)


def test_versions_of_modules_are_found_by_both_names():
    trainer = built("several layers", "a module")
    metadata = trainer.state_dict()._metadata
    assert metadata["net.1"] == metadata["net.module.1"] == {"version": 2}
    assert "module" not in "".join(trainer.net.state_dict()._metadata)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("model", MODELS)
def test_a_module_around_the_wrapper_loads_its_own_sharded_state(model, around, tmp_path):
    old, new = built(model, around), built(model, around)
    trackbed.save(sharded_state(old), tmp_path / "step")
    assert load_sharded_state(tmp_path / "step", new) == {}
    assert_same(new.state_dict(), old.state_dict())


def test_ranks_save_and_load_a_module_around_the_wrapper(tmp_path):
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True
    )

    def trained(group, seed):
        torch.manual_seed(seed)
        trainer = Trainer(DistributedDataParallel(nn.Linear(2, 2), config, process_group=group))
        optimizer = DataParallelOptimizer(torch.optim.AdamW(trainer.net.module.parameters()), trainer.net)
        trainer.net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return trainer

    def on(group):
        old, new = trained(group, 0), trained(group, 1)
        trackbed.save(sharded_state(old, group=group), tmp_path / "step", group=group)
        load_sharded_state(tmp_path / "step", new, group=group)
        assert_same(new.state_dict(), old.state_dict())

    run_ranks(2, on)
