"""States of compiled modules have the names of the module, and older ones that have not are loaded."""

import copy
import warnings

import pytest
import torch
from torch import nn

from trackbed.checkpoint import ShardedTensor, load, open_checkpoint, save
from trackbed.comm import SOLO, run_ranks
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer, load_sharded_state, sharded_state


def plain():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).bfloat16()


def compiled_whole():
    return torch.compile(plain(), backend="eager")


def compiled_parts():
    model = plain()
    model[0], model[2] = torch.compile(model[0], backend="eager"), torch.compile(model[2], backend="eager")
    return model


MODELS = {"plain": plain, "whole": compiled_whole, "parts": compiled_parts}
NAMES = {f"model.{name}" for name in plain().state_dict()}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(make, group=SOLO, steps=2, *, is_sharded=True):
    config = DistributedDataParallelConfig(use_distributed_optimizer=is_sharded)
    model = DistributedDataParallel(make(), config, process_group=group)
    optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    for number in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 3), number + 1.0).bfloat16()).sum().backward()
        optimizer.step()
    return model, optimizer


def values(model):
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("saved", MODELS)
@pytest.mark.parametrize("loaded", MODELS)
def test_a_checkpoint_of_one_kind_loads_into_any_other(saved, loaded, tmp_path):
    model, optimizer = trained(MODELS[saved])
    save({**sharded_state(model, optimizer), "step": 2}, tmp_path / "checkpoint", group=SOLO)
    keys = set(open_checkpoint(tmp_path / "checkpoint"))
    assert {key for key in keys if key.startswith("model.")} == NAMES
    assert not any("_orig_mod" in key for key in keys)
    again, other = trained(MODELS[loaded], steps=0)
    assert load_sharded_state(tmp_path / "checkpoint", again, other) == {"step": 2}
    assert equal(values(model), values(again))
    for name, state in optimizer.full_state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.full_state_dict()["state"][name][key]))


@pytest.mark.parametrize("loaded", MODELS)
def test_an_older_checkpoint_with_names_of_torch_compile_is_loaded(loaded, tmp_path):
    model, optimizer = trained(plain)
    state = sharded_state(model, optimizer)
    older = {"model": {}, "optimizer": copy.copy(state["optimizer"])}
    for name, entry in state["model"].items():
        entry.key = entry.key.replace("model.", "model._orig_mod.")
        older["model"][f"_orig_mod.{name}"] = entry
    older["optimizer"]["state"] = {f"_orig_mod.{name}": one for name, one in state["optimizer"]["state"].items()}
    for one in older["optimizer"]["state"].values():
        for key, entry in one.items():
            if isinstance(entry, ShardedTensor):
                entry.key = entry.key.replace(f".{key}.", f".{key}._orig_mod.")
    older["optimizer"]["divided"] = {f"_orig_mod.{name}": one for name, one in state["optimizer"]["divided"].items()}
    older["optimizer"]["param_groups"] = [
        {**group, "params": [f"_orig_mod.{name}" for name in group["params"]]}
        for group in state["optimizer"]["param_groups"]
    ]
    save(older, tmp_path / "checkpoint", group=SOLO)
    again, other = trained(MODELS[loaded], steps=0)
    load_sharded_state(tmp_path / "checkpoint", again, other)
    assert equal(values(model), values(again))
    assert other.full_state_dict()["state"].keys() == optimizer.full_state_dict()["state"].keys()


@pytest.mark.parametrize("loaded", MODELS)
def test_a_full_state_of_an_older_version_is_loaded(loaded):
    _, optimizer = trained(plain)
    state = optimizer.full_state_dict()
    older = {
        "state": {f"_orig_mod.{name}": one for name, one in state["state"].items()},
        "param_groups": [
            {**group, "params": [f"_orig_mod.{name}" for name in group["params"]]} for group in state["param_groups"]
        ],
    }
    _, other = trained(MODELS[loaded], steps=0)
    other.load_full_state_dict(older)
    found = other.full_state_dict()["state"]
    assert found.keys() == state["state"].keys()
    assert all(torch.equal(found[name]["exp_avg"], one["exp_avg"]) for name, one in state["state"].items())


def test_a_model_alone_and_a_wrapper_that_is_compiled_as_a_whole(tmp_path):
    model = compiled_parts()
    save(sharded_state(model), tmp_path / "alone", group=SOLO)
    assert set(open_checkpoint(tmp_path / "alone")) == NAMES
    wrapper, optimizer = trained(compiled_whole)
    whole = torch.compile(wrapper, backend="eager")
    save(sharded_state(whole, optimizer), tmp_path / "wrapper", group=SOLO)
    assert {key for key in open_checkpoint(tmp_path / "wrapper") if key.startswith("model.")} == NAMES
    again, other = trained(plain, steps=0)
    load_sharded_state(tmp_path / "wrapper", torch.compile(again, backend="eager"), other)
    assert equal(values(again), values(wrapper))
    fresh = plain()
    load_sharded_state(tmp_path / "wrapper", fresh)
    assert equal(values(fresh), values(wrapper))


def test_ranks_of_another_number_load_a_compiled_checkpoint(tmp_path):
    def saving(group):
        model, optimizer = trained(compiled_parts, group)
        save(sharded_state(model, optimizer), tmp_path / "checkpoint", group=group)

    run_ranks(2, saving)

    def loading(group):
        model, optimizer = trained(plain, group, steps=0)
        load_sharded_state(tmp_path / "checkpoint", model, optimizer)
        return values(model)

    found = run_ranks(3, loading)
    assert equal(found[0], found[2])
    stored = load({}, tmp_path / "checkpoint", group=SOLO)
    assert set(stored["optimizer"]["divided"]) == {name for name, _ in plain().named_parameters()}
