"""States of optimizers as programs keep them: any value, keys that are no parameters, and looks at no state."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import trackbed
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CheckpointError, CollectiveError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer
from trackbed.optim.update_agreement import digest_of_state

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 3}
WAYS = {
    "default": {},
    "overlap": OVERLAP,
    "sharded": {"use_distributed_optimizer": True},
    "sharded, overlap": OVERLAP | {"use_distributed_optimizer": True, "overlap_param_gather": True},
}
VALUES = {
    "inf": math.inf,
    "minus inf": -math.inf,
    "nan": math.nan,
    "tuple": (0.9, 0.99),
    "nested": {"betas": (0.9, [1, 2, (3,)]), 5: None, "inner": {"deep": {"deeper": math.inf}}},
    "large": 2**70,
    "negative": -(2**64),
    "complex": 1 + 2j,
    "bytes": b"\x00\xff",
    "set": {1, 2, 3},
    "table": torch.arange(10.0).view(5, 2),
    "tensor in a list": [torch.tensor(1.5), torch.tensor([2])],
    "list": [1, 2.5, "x", None, True],
    "empty tuple": (),
    "empty dictionary": {},
    "truth": True,
    "integer": 7,
    "text": "\ud7ff\u0000 text",
}


class Keeping(torch.optim.SGD):
    """Keeps values in the state of each parameter, and some under keys that are no parameters."""

    is_elementwise = True
    values: dict = VALUES
    others: dict = {}  # noqa: RUF012  replaced as a whole

    def step(self):
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(self.values)
        self.state.update(self.others)


def wrap(group, way, dtype=torch.float32, kind=Keeping, **options):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module = module.to_empty(device="cpu").to(dtype)
    with torch.no_grad():
        for number, param in enumerate(module.parameters()):
            param.fill_(number + 1)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**WAYS[way]), process_group=group)
    torchs = kind(module.parameters(), lr=0.1, momentum=0.9, **options)
    return model, torchs, DataParallelOptimizer(torchs, model)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2, dtype=model.module[0].weight.dtype)).sum().backward()
    optimizer.step()
    model.wait_for_params()


def assert_same(one, other):
    """Asserts that two values are equal, and of the same classes."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    else:
        assert one == other or (one != one and other != other)


@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_that_the_program_kept_in_every_layout_and_load(way, tmp_path):
    def run(group):
        model, _, optimizer = wrap(group, way)
        step(model, optimizer)
        full = optimizer.full_state_dict()
        split, _ = optimizer.split_state_dict()
        _, _, new = wrap(group, way)
        new.load_full_state_dict(full)
        third_model, _, third = wrap(group, way)
        trackbed.save(trackbed.sharded_state(model, optimizer), tmp_path / "state", group=group)
        trackbed.load_sharded_state(tmp_path / "state", third_model, third)
        for state in (full, split, new.full_state_dict(), third.full_state_dict()):
            for own in state["state"].values():
                assert_same({key: own[key] for key in VALUES}, VALUES)
        for one, its_optimizer in ((model, optimizer), (third_model, third)):
            step(one, its_optimizer)
        assert all(map(torch.equal, model.module.parameters(), third_model.module.parameters()))

    run_ranks(2, run)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(min_size=1) | st.complex_numbers(),
    lambda below: (
        st.lists(below, max_size=3)
        | st.lists(below, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), below, max_size=3)
    ),
    max_leaves=5,
)


@given(PLAIN)
def test_any_plain_value_is_that_of_an_optimizer_that_is_not_sharded(value):
    model, torchs, optimizer = wrap(SOLO, "sharded")
    main = torchs.param_groups[0]["params"][0]
    torchs.state[main] = {"value": copy.deepcopy(value)}
    ((name, state),) = optimizer.full_state_dict()["state"].items()
    assert name in dict(model.module.named_parameters())
    assert_same(state["value"], value)


def test_tensors_inside_a_value_are_refused_by_name_where_nobody_can_tell_whose_parts_they_are():
    class History(Keeping):
        values = {"history": [{"last": torch.ones(2)}]}  # noqa: RUF012  a constant

    model, _, optimizer = wrap(SOLO, "sharded", kind=History)
    step(model, optimizer)
    with pytest.raises(ArgumentError, match=r"'history' of 0\.weight must have tensors of one element"):
        optimizer.full_state_dict()
    model, _, optimizer = wrap(SOLO, "default", kind=History)
    step(model, optimizer)
    assert optimizer.full_state_dict()["state"]["1.bias"]["history"][0]["last"].tolist() == [1, 1]


class Unknown:
    """A class that is not allowed."""


def test_a_value_of_a_class_that_is_not_allowed_is_refused_by_name():
    class Odd(Keeping):
        values = {"fine": (1, 2), "odd": [Unknown()]}  # noqa: RUF012  a constant

    model, _, optimizer = wrap(SOLO, "sharded", kind=Odd)
    step(model, optimizer)
    with pytest.raises(CheckpointError, match=r"state of the optimizer: 'odd' of 0\.weight: .*Unknown"):
        optimizer.full_state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_a_look_at_the_state_of_a_parameter_changes_nothing(way, dtype, tmp_path):
    def run(group):
        model, torchs, optimizer = wrap(group, way, dtype)
        frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        for is_early in (True, False):
            for param in (*model.module.parameters(), frozen):
                torchs.state[param]
            state = copy.deepcopy(optimizer.state_dict())
            for param in (*model.module.parameters(), frozen):
                torchs.state[param]
            optimizer.load_state_dict(state)
            for param in model.module.parameters():
                torchs.state[param]
            optimizer.load_full_state_dict(optimizer.full_state_dict())
            torchs.state[frozen]
            trackbed.sharded_state(model, optimizer)
            torchs.state[model.module[0].weight]
            if is_early:
                step(model, optimizer)
        assert len(optimizer.full_state_dict()["state"]) == 4

    run_ranks(2, run)


def test_a_look_before_wrapping_changes_nothing():
    module = nn.Linear(2, 2)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    sgd.state[module.weight]
    sgd.state[torch.ones(3)]
    model = DistributedDataParallel(module, process_group=SOLO)
    optimizer = DataParallelOptimizer(sgd, model)
    optimizer.state_dict()
    assert optimizer.full_state_dict()["state"] == {}


@pytest.mark.parametrize("way", ["sharded", "sharded, overlap"])
def test_a_table_that_differs_between_the_ranks_of_a_parameter_is_refused(way):
    def run(group):
        class Own(Keeping):
            values = {"table": torch.full((5, 2), float(group.rank))}  # noqa: RUF012  a constant

        module = nn.Linear(40, 40)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**WAYS[way]), process_group=group)
        optimizer = DataParallelOptimizer(Own(module.parameters(), lr=0.1), model)
        optimizer.zero_grad()
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
        model.wait_for_params()
        for take in (optimizer.full_state_dict, optimizer.split_state_dict):
            with pytest.raises(
                CollectiveError, match=r"'table' of \w+ has the shape \[5, 2\], .* must be the same on all"
            ):
                take()

    run_ranks(2, run)


class WithoutElements(nn.Module):
    def __init__(self):
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 3))
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.linear(inputs).sum() + self.none.sum()


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_without_elements_has_its_state_in_every_layout_and_load(size, dtype, tmp_path):
    def run(group):
        def new(way):
            module = WithoutElements().to(dtype)
            model = DistributedDataParallel(module, DistributedDataParallelConfig(**WAYS[way]), process_group=group)
            return model, DataParallelOptimizer(torch.optim.AdamW(module.parameters()), model)

        def train(model, optimizer):
            optimizer.zero_grad()
            model(torch.ones(1, 2, dtype=dtype)).backward()
            optimizer.step()
            model.wait_for_params()

        for number, way in enumerate(WAYS):
            model, optimizer = new(way)
            train(model, optimizer)
            folder = tmp_path / f"step-{number}"
            trackbed.save(trackbed.sharded_state(model, optimizer), folder, group=group)
            for other_way in WAYS:
                by_full, by_shards = new(other_way), new(other_way)
                by_full[1].load_full_state_dict(optimizer.full_state_dict())
                trackbed.load_sharded_state(folder, *by_shards)
                for pair in (by_full, by_shards):
                    train(*pair)
                    state = pair[1].full_state_dict()["state"]
                    assert list(state) == ["none", "linear.weight", "linear.bias"]
                    assert state["none"]["step"] == state["linear.bias"]["step"] == 2
                    assert state["none"]["exp_avg"].shape == (0, 3)

    run_ranks(size, run)


OTHERS = {"count": 5, ("a", 1): torch.arange(3), 7: {"best": math.inf}}


@pytest.mark.parametrize("way", WAYS)
def test_states_under_keys_that_are_no_parameters_are_kept_in_every_load(way, tmp_path):
    class Counting(Keeping):
        values = {}  # noqa: RUF012  a constant
        others = OTHERS

    def run(group):
        model, torchs, optimizer = wrap(group, way, kind=Counting)
        step(model, optimizer)
        for load in ("full", "sharded"):
            new_model, new_torchs, new = wrap(group, way, kind=Counting)
            if load == "full":
                new.load_state_dict(optimizer.state_dict())
            else:
                trackbed.save(trackbed.sharded_state(model, optimizer), tmp_path / "state", group=group)
                trackbed.load_sharded_state(tmp_path / "state", new_model, new)
            found = {key: value for key, value in new_torchs.state.items() if not isinstance(key, torch.Tensor)}
            assert_same(found, OTHERS)
        again = DataParallelOptimizer(torchs, model) if way in ("default", "overlap") else optimizer
        assert_same(again.full_state_dict()["other_state"], OTHERS)

    run_ranks(2, run)


@pytest.mark.parametrize("way", ["sharded", "sharded, overlap"])
def test_a_state_that_a_program_puts_under_the_parameter_in_the_place_of_its_part_is_refused_by_name(way):
    model, torchs, optimizer = wrap(SOLO, way)
    torchs.state[model.module[1].weight]["best"] = 1.0
    for take in (optimizer.state_dict, optimizer.full_state_dict, optimizer.split_state_dict):
        with pytest.raises(ArgumentError, match=r"state of the optimizer: .* there is one of 1\.weight itself"):
            take()


def test_the_digest_of_a_state_does_not_depend_on_addresses_and_the_order_of_sets():
    class Plain:
        pass

    states = [{"weight": {"a": Plain(), "b": {"x", "y", "z"}, "c": [torch.ones(2)]}} for _ in range(2)]
    states[1]["weight"]["b"] = {"z", "y", "x"}
    assert digest_of_state(states[0]) == digest_of_state(states[1])
    states[1]["weight"]["c"] = [torch.zeros(2)]
    assert digest_of_state(states[0]) != digest_of_state(states[1])
