"""Models and torch's optimizers that are not divided: saved with `sharded_state`, loaded by name."""

import copy
import itertools
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import trackbed
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError
from trackbed.optim import load_sharded_state, sharded_state

KINDS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01), amsgrad=True, fused=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups),
    "SGD without momentum": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "NAdam": lambda groups: torch.optim.NAdam(groups),
}


def new_model(seed, sizes=(4, 6, 3)):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def step(model, optimizer):
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, torch.as_tensor(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("kind", KINDS)
def test_any_optimizer_of_torch_goes_on_where_it_was(kind, tmp_path):
    model = new_model(1)
    optimizer = KINDS[kind](model.parameters())
    for _ in range(3):
        step(model, optimizer)

    def run(group):
        trackbed.save({**sharded_state(model, optimizer, group=group), "step": 3}, tmp_path / "saved", group=group)

    run_ranks(2, run)
    loaded = new_model(2)
    theirs = KINDS[kind](loaded.parameters())
    assert load_sharded_state(tmp_path / "saved", loaded, theirs, group=SOLO) == {"step": 3}
    assert same(loaded.state_dict(), model.state_dict())
    assert same(theirs.state_dict(), optimizer.state_dict())
    for _ in range(2):
        step(model, optimizer)
        step(loaded, theirs)
    assert same(loaded.state_dict(), model.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_names_are_those_of_torch_and_its_reader_finds_them(tmp_path):
    model = new_model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    trackbed.save(sharded_state(model, optimizer, group=SOLO), tmp_path / "saved", group=SOLO)
    msd, osd = copy.deepcopy(get_state_dict(model, optimizer))
    found = {"model": {name: torch.zeros_like(value) for name, value in msd.items()}}
    found["optimizer"] = {
        "state": {
            name: {field: torch.zeros_like(value) for field, value in fields.items()}
            for name, fields in osd["state"].items()
        }
    }
    dcp.load(found, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert same(found["model"], dict(msd))
    assert same(found["optimizer"]["state"], osd["state"])


def saved(folder, model, optimizer):
    step(model, optimizer)
    trackbed.save(sharded_state(model, optimizer, group=SOLO), folder, group=SOLO)


def test_groups_are_matched_by_their_members(tmp_path):
    model = new_model(1)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(
        [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.2}, {"params": [], "lr": 0.3}], momentum=0.9
    )
    saved(tmp_path / "saved", model, optimizer)
    other = new_model(2)
    params = list(other.parameters())
    groups = [{"params": []}, {"params": params[3:]}, {"params": params[1:3]}, {"params": params[:1]}]
    theirs = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
    load_sharded_state(tmp_path / "saved", other, theirs, group=SOLO)
    assert [group["lr"] for group in theirs.param_groups] == [0.3, 0.2, 0.1, 0.1]
    assert {group["momentum"] for group in theirs.param_groups} == {0.9}
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(optimizer.state[a]["momentum_buffer"], theirs.state[b]["momentum_buffer"]) for a, b in pairs)


def test_options_of_the_program_stay_on_request(tmp_path):
    model = new_model(1)
    saved(tmp_path / "saved", model, torch.optim.AdamW(model.parameters(), lr=0.5, foreach=True))
    for options, rate in (("program", 0.1), ("checkpoint", 0.5)):
        other = new_model(2)
        theirs = torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
        load_sharded_state(tmp_path / "saved", other, theirs, options=options, group=SOLO)
        group = theirs.param_groups[0]
        assert (group["lr"], group["fused"], group["foreach"]) == (rate, True, None)
        assert len(theirs.state) == 4
    with pytest.raises(CheckpointError, match="options: must be 'checkpoint' or 'program', found 'mine'"):
        load_sharded_state(tmp_path / "saved", other, theirs, options="mine", group=SOLO)


def test_added_and_removed_parameters_are_told(tmp_path, caplog):
    model = new_model(1)
    model[0].bias.requires_grad_(requires_grad=False)
    saved(tmp_path / "saved", model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad]))
    other = new_model(2)
    theirs = torch.optim.AdamW([other[0].weight, other[0].bias, other[1].weight])
    with caplog.at_level(logging.WARNING, logger="trackbed"):
        load_sharded_state(tmp_path / "saved", other, theirs, group=SOLO)
    assert "that of 1.bias is stored, but the optimizer does not have it" in caplog.text
    assert "none is stored for 0.bias, which begin anew" in caplog.text
    assert len(theirs.state) == 2


def test_several_models_and_optimizers_are_one_state(tmp_path):
    def new(seed):
        model = new_model(seed, (4, 5, 6, 4))
        parts = [nn.Sequential(), nn.Sequential()]
        for number, layer in enumerate(model):
            parts[number % 2].add_module(f"layer{number}", layer)
        return (
            model,
            parts,
            [torch.optim.AdamW(parts[0].parameters()), torch.optim.SGD(parts[1].parameters(), 0.1, 0.9)],
        )

    model, parts, optimizers = new(1)
    for optimizer in optimizers:
        step(model, optimizer)
    trackbed.save(sharded_state(parts, optimizers, group=SOLO), tmp_path / "saved", group=SOLO)
    other, others, theirs = new(2)
    load_sharded_state(tmp_path / "saved", others, theirs, group=SOLO)
    assert same(other.state_dict(), model.state_dict())
    assert all(same(one.state_dict(), two.state_dict()) for one, two in zip(theirs, optimizers, strict=True))
    with pytest.raises(CheckpointError, match="the modules of a list must have different names, but two have 0"):
        sharded_state([new_model(1), new_model(1)], group=SOLO)


def test_a_model_on_the_meta_device_is_refused_with_advice(tmp_path):
    trackbed.save(sharded_state(new_model(1), group=SOLO), tmp_path / "saved", group=SOLO)
    with torch.device("meta"):
        model = new_model(1)
    calls = [
        lambda: sharded_state(model, group=SOLO),
        lambda: load_sharded_state(tmp_path / "saved", model, group=SOLO),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=r"0\.weight must have memory, .* meta device: call model.to_empty"):
            call()


def test_types_that_torchs_optimizer_needs_are_cast_on_request(tmp_path):
    model = new_model(1).double()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    trackbed.save(sharded_state(model, optimizer, group=SOLO), tmp_path / "saved", group=SOLO)
    other = new_model(2)
    theirs = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointError, match="pass allow_cast=True to round them"):
        load_sharded_state(tmp_path / "saved", other, theirs, group=SOLO)
    assert not theirs.state
    load_sharded_state(tmp_path / "saved", other, theirs, allow_cast=True, group=SOLO)
    assert theirs.state[other[0].weight]["exp_avg"].dtype == torch.float32
    step(other, theirs)


def test_other_states_of_optimizers_are_told_apart(tmp_path):
    model = new_model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    plain = {**sharded_state(model, group=SOLO), "optimizer": optimizer.state_dict()}
    trackbed.save(plain, tmp_path / "plain", group=SOLO)
    with pytest.raises(CheckpointError, match="found a plain value: leave the optimizer out here"):
        load_sharded_state(tmp_path / "plain", model, optimizer, group=SOLO)
    assert "optimizer" in load_sharded_state(tmp_path / "plain", model, group=SOLO)
    trackbed.save(sharded_state(model, group=SOLO), tmp_path / "none", group=SOLO)
    with pytest.raises(CheckpointError, match=r"must have a state of the optimizer, but has no optimizer\.\* keys"):
        load_sharded_state(tmp_path / "none", model, optimizer, group=SOLO)


CONFIG = trackbed.DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=20)


def wrapped(group, seed):
    model = new_model(seed)
    wrapper = trackbed.DistributedDataParallel(model, CONFIG, process_group=group)
    return wrapper, trackbed.DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), wrapper)


@pytest.mark.parametrize("key_order", ["megatron", "torch"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_states_move_between_trackbeds_optimizer_and_torchs(size, key_order, tmp_path):
    model = new_model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    trackbed.save({**sharded_state(model, optimizer, group=SOLO), "step": 1}, tmp_path / "torch", group=SOLO)

    def run(group):
        wrapper, own = wrapped(group, 2)
        assert load_sharded_state(tmp_path / "torch", wrapper, own) == {"step": 1}
        assert same(wrapper.state_dict(), model.state_dict())
        trackbed.save(sharded_state(wrapper, own, key_order=key_order), tmp_path / "own", group=group)
        return own.full_state_dict()["state"]

    states = run_ranks(size, run)[0]
    names = dict(model.named_parameters())
    assert same(states, {name: optimizer.state[param] for name, param in names.items()})
    stored = trackbed.open_checkpoint(tmp_path / "own")
    key = f"exp_avg.{'0.weight'}" if key_order == "megatron" else f"{'0.weight'}.exp_avg"
    assert torch.equal(stored[f"optimizer.state.{key}"][:], optimizer.state[model[0].weight]["exp_avg"])
    other = new_model(3)
    theirs = torch.optim.AdamW(other.parameters(), lr=1.0)
    load_sharded_state(tmp_path / "own", other, theirs, group=SOLO)
    assert same(theirs.state_dict()["state"], optimizer.state_dict()["state"])
    assert theirs.param_groups[0]["lr"] == 0.01

    def on_other_ranks(group):
        wrapper, own = wrapped(group, 4)
        load_sharded_state(tmp_path / "own", wrapper, own)
        return own.full_state_dict()["state"]

    assert same(run_ranks({1: 8, 2: 3, 3: 2, 8: 3}[size], on_other_ranks)[-1], states)


def test_a_complete_state_as_a_plain_value_is_loaded_too(tmp_path):
    wrapper, own = wrapped(SOLO, 1)
    wrapper(torch.ones(2, 4)).square().sum().backward()
    own.step()
    trackbed.save({**sharded_state(wrapper), "optimizer": own.full_state_dict()}, tmp_path / "full", group=SOLO)
    other, theirs = wrapped(SOLO, 2)
    load_sharded_state(tmp_path / "full", other, theirs)
    assert same(theirs.full_state_dict()["state"], own.full_state_dict()["state"])


class Shared(torch.optim.Optimizer):
    """Optimizer whose averages begin in one memory, and have nested, odd and flat values beside them."""

    def __init__(self, params, more=None):
        self.more = more or {}
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    zeros = torch.zeros_like(param)
                    state.update(fast=zeros, slow=zeros, flat=torch.zeros(param.numel()), **copy.deepcopy(self.more))
                state["fast"] = state["fast"] * 0.5 + param.grad
                state["slow"] = state["slow"] * 0.9 + param.grad
                state["flat"] += 1
                param -= 0.01 * state["fast"]


def test_states_that_share_memory_in_the_program_come_back_apart(tmp_path):
    model = new_model(1)
    optimizer = Shared(model.parameters(), {"nested": {"m": torch.ones(2)}, "list": [1, torch.ones(3)], "none": None})
    for _ in range(2):
        step(model, optimizer)
    trackbed.save(sharded_state(model, optimizer, group=SOLO), tmp_path / "saved", group=SOLO)
    other = new_model(2)
    theirs = Shared(other.parameters(), {"nested": {"m": torch.zeros(2)}, "list": [0, torch.zeros(3)], "none": None})
    for param in other.parameters():
        zeros = torch.zeros_like(param)
        theirs.state[param].update(fast=zeros, slow=zeros)
    load_sharded_state(tmp_path / "saved", other, theirs, group=SOLO)
    assert same(theirs.state_dict()["state"], optimizer.state_dict()["state"])
    assert theirs.state[other[0].weight]["flat"].shape == (24,)


@pytest.mark.parametrize("field", ["ema.fast", "q/shard_0_1", 3])
def test_keys_of_states_that_cannot_be_keys_are_refused(field):
    model = new_model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight][field] = torch.ones(2)
    with pytest.raises(CheckpointError, match="the keys of its states must be texts without"):
        sharded_state(model, optimizer, group=SOLO)


def test_lbfgs_over_one_parameter_goes_on(tmp_path):
    def step_of(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    torch.manual_seed(1)
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    step_of(model, optimizer)
    trackbed.save(sharded_state(model, optimizer, group=SOLO), tmp_path / "saved", group=SOLO)
    other = nn.Linear(3, 2, bias=False)
    theirs = torch.optim.LBFGS(other.parameters(), lr=1.0, max_iter=2)
    load_sharded_state(tmp_path / "saved", other, theirs, group=SOLO)
    step_of(model, optimizer)
    step_of(other, theirs)
    assert torch.equal(model.weight, other.weight)


def test_groups_with_options_of_several_elements_are_merged(tmp_path):
    model = new_model(1)
    params = list(model.parameters())
    groups = [{"params": params[:2], "mask": torch.ones(2)}, {"params": params[2:], "mask": torch.zeros(2)}]
    saved(tmp_path / "saved", model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    other = new_model(2)
    theirs = torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.9)
    load_sharded_state(tmp_path / "saved", other, theirs, group=SOLO)
    assert torch.equal(theirs.param_groups[0]["mask"], torch.ones(2))


def test_parameters_of_one_group_that_had_several_options_are_named(tmp_path, caplog):
    model = new_model(1)
    first, second = model
    optimizer = torch.optim.SGD([{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.2}])
    trackbed.save(sharded_state(model, optimizer, group=SOLO), tmp_path / "saved", group=SOLO)
    theirs = torch.optim.SGD(model.parameters(), lr=0.3)
    load_sharded_state(tmp_path / "saved", model, theirs, group=SOLO)
    assert "had several values of lr, of which that of most is used: {'lr': 0.1}" in caplog.text
    caplog.clear()
    load_sharded_state(tmp_path / "saved", model, optimizer, group=SOLO)
    load_sharded_state(tmp_path / "saved", model, theirs, group=SOLO, options="program")
    assert not caplog.text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_states_that_dcp_has_saved_by_number_are_loaded_by_their_order(tmp_path):
    def new(seed, *sizes):
        model = new_model(seed)
        params = iter(model.parameters())
        return model, torch.optim.AdamW([{"params": [next(params) for _ in range(size)], "lr": size} for size in sizes])

    model, optimizer = new(1, 3, 1)
    step(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}, checkpoint_id=tmp_path)
    loaded, theirs = new(2, 3, 1)
    assert load_sharded_state(tmp_path, loaded, theirs, group=SOLO) == {"step": 4}
    assert same(loaded.state_dict(), model.state_dict())
    assert same(theirs.state_dict(), optimizer.state_dict())
    message = r"by number, in groups of \[3, 1\], and must be .* but those of the program have \[1, 3\]"
    with pytest.raises(CheckpointError, match=message):
        load_sharded_state(tmp_path, *new(2, 1, 3), group=SOLO)
    loaded, one = new(2, 3)
    other = torch.optim.AdamW(list(loaded.parameters())[3:])
    with pytest.raises(CheckpointError, match="its optimizer is no single one of torch"):
        load_sharded_state(tmp_path, loaded, [one, other], group=SOLO)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("has_names", [True, False])
def test_parameters_by_number_in_another_order_are_found_by_name_or_refused(has_names, tmp_path):
    def new(seed, *, turned):
        model = new_model(seed)
        named = list(model.named_parameters())[:: -1 if turned else 1]
        return model, torch.optim.AdamW(named if has_names else [param for _, param in named])

    model, optimizer = new(1, turned=False)
    step(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    loaded, theirs = new(2, turned=True)
    if not has_names:
        with pytest.raises(CheckpointError, match=r"must have the shape .* of its parameter, but has "):
            load_sharded_state(tmp_path, loaded, theirs, group=SOLO)
        return
    load_sharded_state(tmp_path, loaded, theirs, group=SOLO)
    for (_, one), (_, other) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], theirs.state[other]["exp_avg"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("by_name", [True, False])
def test_options_that_dcp_has_flattened_are_loaded_and_further_entries_too(by_name, tmp_path):
    def new(seed, lr, kind):
        model = new_model(seed)
        groups = [{"params": list(model.parameters()), "more": {"kind": kind, "list": [torch.tensor(lr), 2]}}]
        optimizer = torch.optim.AdamW(groups, lr=torch.tensor(lr))
        optimizer.register_load_state_dict_pre_hook(lambda one, state: seen.append(state.get("extra")))
        return model, optimizer

    seen = []
    model, optimizer = new(1, 0.5, "a")
    step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": {**optimizer.state_dict(), "extra": {"n": [7]}}}
    if by_name:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        seen.clear()
    dcp.save(state, checkpoint_id=tmp_path)
    loaded, theirs = new(2, 0.9, "b")
    load_sharded_state(tmp_path, loaded, theirs, group=SOLO)
    assert same(theirs.state_dict()["state"], optimizer.state_dict()["state"])
    (group,) = theirs.param_groups
    assert (group["lr"], group["more"]["kind"], group["more"]["list"]) == (0.5, "a", [0.5, 2])
    assert seen == [None if by_name else {"n": [7]}]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("flattened", [True, False])
def test_an_optimizer_gets_further_entries_alone(flattened, tmp_path, caplog):
    """States that DCP has flattened are none, and one of a class that is not allowed is left out."""
    seen = []
    model = new_model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_load_state_dict_pre_hook(lambda one, state: seen.append(sorted(state)))
    step(model, optimizer)
    state, of_optimizer = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flattened)
    )
    seen.clear()
    if not flattened:
        of_optimizer = {**of_optimizer, "extra": 7, "odd": Odd()}
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=tmp_path)
    load_sharded_state(tmp_path, model, optimizer, group=SOLO)
    assert seen == [["param_groups", "state"] if flattened else ["extra", "param_groups", "state"]]
    assert ("an entry of the optimizer is left out" in caplog.text) == (not flattened)


class Odd:
    """A class that is not allowed."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_numbers_that_are_none_and_nested_states_are_refused(tmp_path):
    model = new_model(1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)

    def refused(words, change):
        state = optimizer.state_dict()
        change(state)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
        with pytest.raises(CheckpointError, match=words):
            load_sharded_state(folder, model, optimizer, group=SOLO)

    words = "params: must be different numbers or names"
    refused(words, lambda state: state["param_groups"][0].update(params=7))
    refused(words, lambda state: state["param_groups"][0].update(params=[0, 0, 1, 1]))
    refused(r"param_groups.1: must be a parameter group, but is of int", lambda state: state["param_groups"].append(3))
    inner = {"x": torch.ones(2)}
    refused("but 'inner' of that of 0.weight has some further", lambda state: state["state"][0].update(inner=inner))


def test_a_checkpoint_without_an_optimizer_says_what_it_has(tmp_path):
    model = new_model(1)
    trackbed.save(sharded_state(model, group=SOLO), tmp_path / "saved", group=SOLO)
    message = r"must have a state of the optimizer, but has no optimizer.\* keys, found model: leave the optimizer out"
    with pytest.raises(CheckpointError, match=message):
        load_sharded_state(tmp_path / "saved", model, torch.optim.SGD(model.parameters()), group=SOLO)
