"""States of optimizers under the keys of entries: tensor parallelism, stacked layers, factories, pipelines."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trackbed
from tests.support.models.placed import WIDTH, all_places, halves, new, saved, whole_tensors
from trackbed import ShardedTensor, checkpoint, load_sharded_state, save, sharded_state
from trackbed.checkpoint import ShardedObject, ShardedTensorFactory, open_checkpoint
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.optim.in_checkpoints.placed_parts import entries_of_range, places_of_entries


def loaded(folder, place, group, dtype):
    model, optimizer = new(place, group, 3, dtype)
    found = load_sharded_state(folder, model, optimizer, entries=model.module.entries(group.rank))
    state = optimizer.full_state_dict()
    assert model.module.scale == 7
    values = {name: value.detach().clone() for name, value in model.module.named_parameters()}
    return found, state, values, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [((1, 1, 1), torch.float32), ((2, 1, 2), torch.bfloat16), ((1, 2, 3), torch.bfloat16), ((2, 2, 1), torch.float32)],
)
def test_states_of_any_parallelism_are_those_of_the_whole_model_and_load_under_any_other(layout, dtype, tmp_path):
    folder = tmp_path / "saved"
    num_tensor, num_stages, num_copies = layout
    wanted = whole_tensors(saved(folder, num_tensor, num_stages, num_copies, dtype), num_tensor)
    opened = open_checkpoint(folder)
    stored = {key: opened[key][...] for key in opened if key.startswith("optimizer.state.")}
    # Parameters in float32 are there for Megatron Core, though they are the model's own.
    params = {key: value for key, value in stored.items() if ".param." in key}
    for key, value in params.items():
        assert torch.equal(value.to(dtype), opened[key.removeprefix("optimizer.state.param.")][...])
    if dtype == torch.float32:
        stored = {key: value for key, value in stored.items() if key not in params}
    assert stored.keys() == wanted.keys()
    assert all(torch.equal(stored[key], value) for key, value in wanted.items())
    for num_tensor, num_stages, num_copies in ((1, 1, 2), (2, 1, 1), (1, 2, 1)):
        reports = {}
        for place in all_places(num_tensor, num_stages):
            outcomes = run_ranks(num_copies, lambda group, place=place: loaded(folder, place, group, dtype))
            found, reports[place], values, rate = outcomes[0]
            assert found == {"step": 2}
            assert rate == 0.01
            assert {float(state["step"]) for state in reports[place]["state"].values()} == {2.0}
            assert not any(value.isnan().any() for value in values.values())
            if place[2] == 0:
                size = 10 // num_tensor
                rows = slice(place[0] * size, (place[0] + 1) * size)
                assert torch.equal(values["embedding.weight"], opened["embedding.weight"][rows])
        assert all(torch.equal(wanted[key], value) for key, value in whole_tensors(reports, num_tensor).items())


def test_a_part_that_is_given_wrongly_is_refused(tmp_path):
    model, optimizer = new((0, 1, 0, 1), SOLO, 1, torch.float32)
    good = model.module.entries()
    lacking = {name: entry for name, entry in good.items() if name != "head.weight"}
    with pytest.raises(
        CheckpointError, match=r"entries: must have an entry for each parameter and buffer, but have none for head"
    ):
        sharded_state(model, optimizer, entries=lacking, group=SOLO)
    other = {**good, "head.weight": ShardedTensor.from_rank_offsets("head.weight", torch.zeros(3, WIDTH))}
    with pytest.raises(CheckpointError, match=r"that of head.weight must have the parameter .* itself"):
        sharded_state(model, optimizer, entries=other, group=SOLO)
    with pytest.raises(CheckpointError, match="must be those of the module's tensors and objects, but more"):
        sharded_state(model, optimizer, entries={**good, "more": 3}, group=SOLO)
    with pytest.raises(CheckpointError, match="must be a dictionary of entries by name, but is of list"):
        sharded_state(model, optimizer, entries=[], group=SOLO)
    plain = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="must be those of one module, alone or with its DataParallelOptimizer"):
        sharded_state(plain, torch.optim.AdamW(plain.parameters()), entries={}, group=SOLO)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_such_states_is_refused_and_changes_nothing(tmp_path):
    model, optimizer = new((0, 1, 0, 1), SOLO, 1, torch.float32)
    before = [parameter.clone() for parameter in model.parameters()]
    state = sharded_state(model, optimizer, entries=model.module.entries(), group=SOLO)
    save({"model": state["model"]}, tmp_path / "model", group=SOLO)
    other, fresh = new((0, 1, 0, 1), SOLO, 2, torch.float32)
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), before, strict=True):
            parameter.copy_(value + 1)
    with pytest.raises(CheckpointError, match=r"must have the state of an optimizer that sharded_state\(entries=...\)"):
        load_sharded_state(tmp_path / "model", other, fresh, entries=other.module.entries(), group=SOLO)
    assert all(torch.equal(own, value + 1) for own, value in zip(other.parameters(), before, strict=True))
    load_sharded_state(tmp_path / "model", other, entries=other.module.entries(), group=SOLO)
    assert all(map(torch.equal, other.parameters(), before))


@given(data=st.data())
def test_ranges_of_parts_fill_a_stored_tensor_once(data):
    """Against an array in which each element is put where an index at a time says."""
    dims = data.draw(st.integers(1, 3), label="dims")
    counts = data.draw(st.tuples(*[st.integers(1, 3)] * dims), label="parts along each axis")
    shape = data.draw(st.tuples(*[st.integers(1, 4)] * dims), label="shape of a part")
    num_halves = data.draw(st.sampled_from([1, 2]), label="parts of a factory")
    num_stacked = data.draw(st.integers(0, 2), label="stacked layers")
    shape = (shape[0] * num_halves, *shape[1:])
    axes = 1 if num_stacked else 0
    grid = (counts[0] * num_halves, *counts[1:])
    stored_shape = (num_stacked,) * axes + tuple(
        size // (num_halves if axis == 0 else 1) * number
        for axis, (size, number) in enumerate(zip(shape, grid, strict=True))
    )
    filled, wanted = np.zeros(stored_shape), np.zeros(stored_shape)
    times = np.zeros(stored_shape, dtype=int)
    for layer in range(max(1, num_stacked)):
        for place in np.ndindex(counts):
            param = torch.randn(shape)

            def entry_of(key, half, number, replica_id, place=place, layer=layer):
                where = [(0, layer, num_stacked)] * axes
                where += [
                    (axis + axes, at + (number * counts[0] if axis == 0 else 0), grid[axis])
                    for axis, at in enumerate(place)
                ]
                return ShardedTensor.from_rank_offsets(key, half, *where, prepend_axis_num=axes)

            entry = halves(checkpoint, entry_of)("w", param, 0) if num_halves == 2 else entry_of("w", param, 0, 0)
            parts = places_of_entries({"w": entry}, {"w": param})["w"]
            for index in np.ndindex(shape):
                number, rest = divmod(index[0], shape[0] // num_halves)
                row = (place[0] + number * counts[0]) * (shape[0] // num_halves) + rest
                more = tuple(at * size + own for at, size, own in zip(place[1:], shape[1:], index[1:], strict=True))
                wanted[(layer,) * axes + (row, *more)] = param[index]
            ends = sorted(data.draw(st.lists(st.integers(0, param.numel()), max_size=2), label="ends of ranges"))
            flat = param.reshape(-1) * 2
            for start, stop in zip([0, *ends], [*ends, param.numel()], strict=True):
                for found in entries_of_range(parts, str.upper, flat[start:stop], shape, (start, stop)).values():
                    assert found.key == "W"
                    assert found.global_shape == stored_shape
                    box = tuple(
                        slice(at, at + size)
                        for at, size in zip(found.global_offset, (1,) * axes + found.local_shape, strict=True)
                    )
                    filled[box] = found.data.numpy().reshape(filled[box].shape)
                    times[box] += 1
    assert (times == 1).all()
    np.testing.assert_array_equal(filled, wanted * 2)


def test_a_factory_that_builds_copies_or_too_little_is_refused():
    param = torch.randn(4, 3)

    def building(build):
        return {"w": ShardedTensorFactory("w", param, build, torch.cat)}

    with pytest.raises(ArgumentError, match="that of w must have the parameter of shape"):
        places_of_entries(
            building(lambda key, value, *_: [ShardedTensor.from_rank_offsets(key, value.clone())]), {"w": param}
        )
    box = ShardedTensor.from_rank_offsets
    for build in (
        lambda key, value, *_: [box(key, value[:2])],
        lambda key, value, *_: [box(key, value[:2]), box(key, value[:2])],
        lambda key, value, *_: [box(key, value[:2]), box(key, value[1:3])],
        lambda *_: [],
    ):
        with pytest.raises(ArgumentError, match="what the factory of w builds must have each of its elements once"):
            places_of_entries(building(build), {"w": param})
    assert places_of_entries(building(lambda key, value, *_: box(key, value)), {"w": param})["w"][0].shape == (4, 3)
    for wrong in ("0", None, 1.5):
        with pytest.raises(ArgumentError, match="the number of a copy must be an integer or a tuple of integers"):
            places_of_entries({"w": box("w", param, replica_id=wrong)}, {"w": param})


def own_entries(module, copy=0):
    """Entries of a module that all ranks have, whose keys are its names."""
    return {
        name: ShardedTensor.from_rank_offsets(name, value, replica_id=(0, 0, copy))
        for name, value in module.state_dict(keep_vars=True).items()
        if isinstance(value, torch.Tensor)
    }


def wrapped(model, group=SOLO, kind=torch.optim.AdamW, groups=None, *, sharded=True, **options):
    config = trackbed.DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    wrapper = trackbed.DistributedDataParallel(model, config, process_group=group)
    return wrapper, trackbed.DataParallelOptimizer(kind(groups or model.parameters(), **options), wrapper)


def linear(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def step(wrapper, optimizer):
    optimizer.zero_grad()
    first = next(iter(wrapper.module.parameters()))
    wrapper(torch.ones(2, 3, dtype=first.dtype)).float().square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("steps", "sharded"), [(0, True), (2, False)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_elementwise_optimizer_goes_on(kind, options, steps, sharded, dtype, tmp_path):
    wrapper, optimizer = wrapped(linear(1, dtype), kind=kind, sharded=sharded, **options)
    for _ in range(steps):
        step(wrapper, optimizer)
    optimizer.param_groups[0]["initial_lr"] = 0.7  # as a schedule has it
    save(sharded_state(wrapper, optimizer, entries=own_entries(wrapper.module)), tmp_path / "saved", group=SOLO)
    other, fresh = wrapped(linear(2, dtype), kind=kind, sharded=sharded, **options)
    load_sharded_state(tmp_path / "saved", other, fresh, entries=own_entries(other.module))
    assert fresh.param_groups[0]["initial_lr"] == 0.7
    for one in ((wrapper, optimizer), (other, fresh)):
        step(*one)
    assert all(map(torch.equal, wrapper.parameters(), other.parameters()))


def test_a_state_under_keys_that_are_the_names_is_loaded_without_entries(tmp_path):
    wrapper, optimizer = wrapped(linear(1, torch.bfloat16), lr=0.01)
    step(wrapper, optimizer)
    named = {
        name: ShardedTensor.from_rank_offsets(f"model.{name}", entry.data, replica_id=(0, 0, 0))
        for name, entry in own_entries(wrapper.module).items()
    }
    state = sharded_state(wrapper, optimizer, entries=own_entries(wrapper.module))
    state["model"] = named
    save(state, tmp_path / "saved", group=SOLO)
    other, fresh = wrapped(linear(2, torch.bfloat16), lr=0.01)
    load_sharded_state(tmp_path / "saved", other, fresh)
    wanted, found = optimizer.full_state_dict()["state"], fresh.full_state_dict()["state"]
    assert wanted.keys() == found.keys()
    for name, fields in wanted.items():
        assert fields.keys() == found[name].keys()
        assert all(torch.equal(value, found[name][key]) for key, value in fields.items())
    plain = linear(3, torch.bfloat16)
    adamw = torch.optim.AdamW(plain.parameters())
    load_sharded_state(tmp_path / "saved", plain, adamw, group=SOLO, allow_cast=True)
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in adamw.state.values())


def stacked(model, copy=0):
    """Entries of two equal layers that are stored as one tensor."""
    return {
        name: ShardedTensor.from_rank_offsets(
            name[2:], value, (0, int(name[0]), 2), replica_id=(0, 0, copy), prepend_axis_num=1
        )
        for name, value in model.state_dict(keep_vars=True).items()
    }


def test_layers_in_one_tensor_must_have_one_rate_and_one_count_of_steps(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = [{"params": list(model[number].parameters()), "lr": 0.1 * (1 + number)} for number in range(2)]
    wrapper, optimizer = wrapped(model, groups=groups)
    step(wrapper, optimizer)
    with pytest.raises(CheckpointError, match=r"all parameters that are stored as weight must have the same 'lr'"):
        sharded_state(wrapper, optimizer, entries=stacked(model))
    optimizer.param_groups[1]["lr"] = 0.1
    save(sharded_state(wrapper, optimizer, entries=stacked(model)), tmp_path / "saved", group=SOLO)
    for fields in optimizer.optimizer.state.values():
        fields["step"] += 1
        break
    with pytest.raises(CheckpointError, match=r"all parameters that are stored as \w+ must have the same 'step'"):
        sharded_state(wrapper, optimizer, entries=stacked(model))


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.bytes = nn.Linear(3, 3), nn.BatchNorm1d(3), torch.zeros(2, dtype=torch.uint8)

    def get_extra_state(self):
        return self.bytes

    def set_extra_state(self, state):
        self.bytes = state


def test_buffers_of_the_first_rank_and_extra_state_that_is_a_tensor_come_back(tmp_path):
    def entries(module, copy):
        extra = ShardedObject("extra", module.bytes, (1,), (0,), (0, 0, copy))
        found = {name: entry for name, entry in own_entries(module, copy).items() if name != "_extra_state"}
        return {**found, "_extra_state": extra}

    def work(group):
        torch.manual_seed(1)
        wrapper, optimizer = wrapped(WithBuffers(), group)
        with torch.no_grad():
            for buffer in wrapper.module.buffers():
                buffer.fill_(3 + group.rank)
        wrapper.module.bytes = torch.tensor([1, 2], dtype=torch.uint8)
        with pytest.raises(
            CheckpointError, match="must have an entry for each parameter and buffer, but have none for"
        ):
            sharded_state(
                wrapper,
                optimizer,
                entries={name: entry for name, entry in entries(wrapper.module, 0).items() if "mean" not in name},
            )
        save(
            sharded_state(wrapper, optimizer, entries=entries(wrapper.module, group.rank)),
            tmp_path / "saved",
            group=group,
        )
        other = WithBuffers()
        load_sharded_state(tmp_path / "saved", other, entries=entries(other, group.rank), group=group)
        return [float(buffer.float().mean()) for buffer in other.buffers()], other.bytes.tolist()

    assert run_ranks(2, work) == [([3.0, 3.0, 3.0], [1, 2])] * 2


def test_tensors_that_are_listed_and_not_stored_are_an_error(tmp_path):
    wrapper, optimizer = wrapped(linear(1, torch.bfloat16), lr=0.01)
    step(wrapper, optimizer)
    state = sharded_state(wrapper, optimizer, entries=own_entries(wrapper.module))
    del state["optimizer"]["state"]["0.weight"]["param"]
    save(state, tmp_path / "saved", group=SOLO)
    other, fresh = wrapped(linear(2, torch.bfloat16), lr=0.01)
    with pytest.raises(CheckpointError, match=r"must have 'param' of 0.weight, but has none"):
        load_sharded_state(tmp_path / "saved", other, fresh, entries=own_entries(other.module))


def test_what_the_module_lacks_is_refused_before_it_is_saved():
    wrapper, optimizer = wrapped(linear(1))
    more = {"rng": ShardedObject("rng", 3, (1,), (0,))}
    with pytest.raises(CheckpointError, match="but rng is none of them"):
        sharded_state(wrapper, optimizer, entries={**own_entries(wrapper.module), **more})
    with pytest.raises(CheckpointError, match="key_order: must be 'megatron' with entries"):
        sharded_state(wrapper, optimizer, entries=own_entries(wrapper.module), key_order="torch")
