"""The state of the optimizer of any number of ranks continues on any other, and in plain torch."""

import io

import pytest
import torch

from tests.support.models.data_parallel import RATE, Case, batch, loss_of, new_model, run_steps, wrap
from trackbed import megatron
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError
from trackbed.grads import DistributedDataParallel
from trackbed.optim import DataParallelOptimizer

BEFORE, STEPS = 4, 8
SHARDED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 700,
}


def saved(state):
    """A state as it is after a file: loaded without unpickling anything but tensors."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def case_of(dtype, num_micro, clip=0.5, options=SHARDED):
    return Case(dtype, num_micro=num_micro, clip=clip, options=dict(options), steps=STEPS)


def start(size, case):
    """Trains the first steps on some ranks. Returns what a checkpoint holds, of each rank."""

    def run(group):
        wrapper, optimizer = wrap(group, case)
        run_steps(wrapper, optimizer, case, 0, BEFORE)
        model = {name: value.clone() for name, value in wrapper.state_dict().items()}
        return {"model": model, "optimizer": optimizer.full_state_dict()}

    return run_ranks(size, run)


def go_on(size, case, checkpoint):
    """Continues on some ranks. Returns parameters, state and norms."""

    def run(group):
        wrapper, optimizer = wrap(group, case)
        wrapper.load_state_dict(checkpoint["model"])
        optimizer.load_full_state_dict(checkpoint["optimizer"])
        _, norms = run_steps(wrapper, optimizer, case, BEFORE, STEPS)
        state = optimizer.full_state_dict()
        return {name: value.clone() for name, value in wrapper.state_dict().items()}, state, norms

    return run_ranks(size, run)[0]


def assert_same(one, other):
    for name, value in one[0].items():
        assert torch.equal(value, other[0][name]), name
    assert one[1]["state"].keys() == other[1]["state"].keys()
    for name, state in one[1]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, other[1]["state"][name][key]), (name, key)
    assert one[2] == other[2]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


# Of 2 x 2 and 4 x 1 micro-batches, and of 2 x 1 and 1 x 2, the sums have the same order.
@pytest.mark.parametrize(("num_micro", "other_size", "other_num_micro"), [(2, 4, 1), (1, 1, 2), (1, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_continue_on_four_and_on_one(dtype, num_micro, other_size, other_num_micro):
    options = {**SHARDED, "grad_reduce_in_fp32": True}
    case = case_of(dtype, num_micro, options=options)
    checkpoints = start(2, case)
    first, second = (saved(checkpoint) for checkpoint in checkpoints)
    assert first["optimizer"]["state"].keys() == second["optimizer"]["state"].keys()
    same = go_on(2, case, first)
    assert_same(same, go_on(other_size, case_of(dtype, other_num_micro, options=options), second))
    whole = {**options, "use_distributed_optimizer": False, "overlap_param_gather": False}
    assert_same(same, go_on(2, case_of(dtype, num_micro, options=whole), first))


def test_the_state_continues_in_plain_torch():
    checkpoint = saved(start(2, case_of(torch.float32, 1, clip=None))[0])
    case = case_of(torch.float32, 2, clip=None)
    ours = go_on(1, case, checkpoint)

    model = new_model()
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    optimizer.load_state_dict(checkpoint["optimizer"])
    for step in range(BEFORE, STEPS):
        optimizer.zero_grad()
        for micro in range(case.num_micro):
            loss_of(model, step * case.num_micro + micro, case.num_micro).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, ours[0][name]), name


@pytest.mark.parametrize("keys", ["numbers", "numbers as text", "names"])
def test_the_state_of_plain_torch_continues_on_ranks(keys):
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loss_of(model, 0, 1).backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    numbered = optimizer.state_dict()
    named = {
        "state": {names[number]: value for number, value in numbered["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]
        ],
    }
    as_text = {**numbered, "state": {str(number): value for number, value in numbered["state"].items()}}
    state = {"numbers": numbered, "numbers as text": as_text, "names": named}[keys]
    case = case_of(torch.float32, 2)

    def run(group):
        wrapper, ours = wrap(group, case)
        wrapper.load_state_dict(model.state_dict())
        ours.load_full_state_dict(state)
        return ours.full_state_dict()

    for found in run_ranks(2, run):
        for name, values in found["state"].items():
            for key, value in values.items():
                assert torch.equal(value, named["state"][name][key]), (name, key)


def test_numbers_of_parameters_are_those_of_several_groups_in_order():
    def groups(model):
        matrices = [param for param in model.parameters() if param.ndim > 1]
        vectors = [param for param in model.parameters() if param.ndim == 1]
        return [{"params": vectors, "weight_decay": 0.0}, {"params": matrices}]

    model = new_model()
    adamw = torch.optim.AdamW(groups(model), lr=RATE)
    loss_of(model, 0, 1).backward()
    adamw.step()
    state = adamw.state_dict()
    other = new_model()
    wrapper = DistributedDataParallel(other, process_group=SOLO)
    ours = DataParallelOptimizer(torch.optim.AdamW(groups(other), lr=RATE), wrapper)
    ours.load_full_state_dict(state)
    found = ours.full_state_dict()["state"]
    for name, param in model.named_parameters():
        if param in adamw.state:
            assert torch.equal(found[name]["exp_avg"], adamw.state[param]["exp_avg"])

    assert "param_names" not in ours.param_groups[0]
    names, others = (group["params"] for group in ours.full_state_dict()["param_groups"])
    state["param_groups"][0]["param_names"], state["param_groups"][1]["param_names"] = list(names), others
    ours.load_full_state_dict(state)
    state["param_groups"][0]["param_names"] = [names[1], names[0], *names[2:5]]
    with pytest.raises(ArgumentError, match=f"number 0 must be {names[0]}, but is {names[1]} by the param_names"):
        ours.load_full_state_dict(state)
    state["param_groups"][0]["params"] = state["param_groups"][0]["params"][1:]
    with pytest.raises(ArgumentError, match=r"must have \[5, 4\] parameters, but have \[4, 4\]"):
        ours.load_full_state_dict(state)
    state["param_groups"][0]["params"].append(state["param_groups"][1]["params"][0])
    with pytest.raises(ArgumentError, match=r"but have \[5, 4\], some of them twice"):
        ours.load_full_state_dict(state)


def test_an_optimizer_that_has_stepped_before_it_is_wrapped_keeps_its_state():
    case = case_of(torch.float32, 2)

    def run(group):
        model = new_model()
        adamw = torch.optim.AdamW(model.parameters(), lr=RATE)
        loss_of(model, 0, 1).backward()
        adamw.step()
        before = {
            name: adamw.state[parameter]["exp_avg"].clone()
            for name, parameter in model.named_parameters()
            if parameter in adamw.state
        }
        for parameter in model.parameters():
            parameter.grad = None
        config = megatron.DistributedDataParallelConfig(**case.options)
        wrapper = megatron.DistributedDataParallel(None, config, model, process_group=group)
        return before, DataParallelOptimizer(adamw, wrapper).full_state_dict()

    for before, state in run_ranks(2, run):
        for name, value in before.items():
            assert torch.equal(state["state"][name]["exp_avg"], value), name


def test_the_batches_differ():
    assert not torch.equal(batch(0), batch(1))
