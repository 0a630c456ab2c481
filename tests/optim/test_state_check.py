"""States that are damaged, or of another optimizer, are refused before anything is loaded."""

import copy
import logging
from functools import partial
from types import MappingProxyType

import pytest
import torch

from tests.support.models.wrapped import backward, layers, wrap
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError
from trackbed.optim import DataParallelOptimizer

SHARDED = MappingProxyType({"use_distributed_optimizer": True, "bucket_size": 10})
WAYS = [{}, SHARDED]
AVERAGE = ("state", "0.weight", "exp_avg")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def same(one, other):
    """True if two states are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def trained(options, kind=torch.optim.AdamW, dtype=torch.float32, **arguments):
    model = layers(4, 3, 2).to(dtype)
    wrapper = wrap(SOLO, model, **options)
    optimizer = DataParallelOptimizer(kind(model.parameters(), lr=1e-2), wrapper, **arguments)
    if dtype == torch.float32:
        for step in range(2):
            optimizer.zero_grad()
            backward(wrapper, step)
            optimizer.step()
    return optimizer


def remove(*keys):
    def change(state):
        for key in keys[:-1]:
            state = state[key]
        del state[keys[-1]]

    return change


def put(value, *keys):
    def change(state):
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


FULL = [
    (remove("state"), r"must have 'state', a mapping, but it has only 'param_groups'"),
    (remove("param_groups"), r"must have 'param_groups', a list, but it has only 'state'"),
    (remove("param_groups", 0, "params"), r"must have 'params', a list, but it has only 'lr'"),
    (remove("param_groups", 0, "lr"), r"parameter group 0 must have a number for 'lr', but has none"),
    (put("fast", "param_groups", 0, "lr"), r"parameter group 0 must have a number for 'lr', but has 'fast'"),
    (put([0.9], "param_groups", 0, "betas"), r"parameter group 0 must have 2 numbers for 'betas', but has \[0\.9\]"),
    (put([], "state"), r"must have 'state', a mapping, but that is of list"),
    (put(None, "state", "0.weight"), r"that of 0\.weight must be a dictionary, but is of NoneType"),
    (put({}, "state", "2.weight"), r"must be of parameters of the model, but has '2\.weight' too"),
    (remove(*AVERAGE), r"'exp_avg' of 0\.weight must be a tensor, but is None"),
    (remove("state", "0.weight", "step"), r"'step' of 0\.weight must be a tensor, but is None"),
    (put(1.0, *AVERAGE), r"'exp_avg' of 0\.weight must be a tensor, but is 1\.0"),
    (put(torch.tensor(1.0), *AVERAGE), r"'exp_avg' of 0\.weight must have the shape \[3, 4\], but has \[\]"),
    (put(torch.ones(4, 3), *AVERAGE), r"'exp_avg' of 0\.weight must have the shape \[3, 4\], but has \[4, 3\]"),
    (
        put(torch.ones(3, 4).long(), *AVERAGE),
        r"'exp_avg' of 0\.weight must be of floating point, but is of torch\.int64",
    ),
    (
        put(torch.ones(3, 4, device="meta"), *AVERAGE),
        r"'exp_avg' of 0\.weight must be a dense tensor with data, but is",
    ),
    (put(torch.eye(3).to_sparse(), *AVERAGE), r"'exp_avg' of 0\.weight must be a dense tensor with data, but is"),
    (
        put(torch.ones(3, 4), "state", "0.weight", "step"),
        r"'step' of 0\.weight must have one element, but has the shape",
    ),
    (put(True, "param_groups", 0, "amsgrad"), r"'max_exp_avg_sq' of 0\.weight must be a tensor, but is None"),
]


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(("change", "words"), FULL)
def test_a_full_state_that_is_damaged_is_refused_and_nothing_is_loaded(change, words, options):
    optimizer = trained(options)
    before = copy.deepcopy(optimizer.full_state_dict())
    state = copy.deepcopy(before)
    state["param_groups"][0]["weight_decay"] = 0.5
    change(state)
    with pytest.raises(ArgumentError, match=f"^state of the optimizer: .*{words}"):
        optimizer.load_full_state_dict(state)
    assert same(optimizer.full_state_dict(), before)


@pytest.mark.parametrize("state", [None, [], 3])
def test_what_is_no_state_is_refused(state):
    optimizer = trained({})
    for load in (optimizer.load_state_dict, optimizer.load_full_state_dict):
        with pytest.raises(ArgumentError, match=r"^state of the optimizer: must be a dictionary with '\w+', but is of"):
            load(state)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize(
    "value", [torch.zeros(4, 3), torch.zeros(3, 4).long(), torch.zeros(1), torch.zeros(3), None, 1.0]
)
def test_a_main_parameter_that_is_none_is_refused_in_a_full_state(value, options):
    optimizer = trained(options, dtype=torch.bfloat16)
    before = copy.deepcopy(optimizer.full_state_dict())
    state = copy.deepcopy(before)
    state["state"]["0.weight"]["main_param"] = value
    with pytest.raises(ArgumentError, match=r"'main_param' of 0\.weight must"):
        optimizer.load_full_state_dict(state)
    assert same(optimizer.full_state_dict(), before)


@pytest.mark.parametrize("options", WAYS)
def test_the_state_of_another_optimizer_is_refused(options):
    state = trained(options, kind=torch.optim.SGD).full_state_dict()
    with pytest.raises(ArgumentError, match="must have 2 numbers for 'betas', but has none"):
        trained(options).load_full_state_dict(state)


@pytest.mark.parametrize("options", WAYS)
def test_a_parameter_without_a_state_begins_anew_with_a_warning(options, caplog):
    optimizer = trained(options)
    state = optimizer.full_state_dict()
    del state["state"]["0.weight"]
    with caplog.at_level(logging.WARNING):
        optimizer.load_full_state_dict(state)
    assert "has none for 0.weight (1 in all), which begin anew" in caplog.text
    assert "0.weight" not in optimizer.full_state_dict()["state"]


@pytest.mark.parametrize("options", WAYS)
def test_a_state_of_an_earlier_version_of_torch_is_converted(options):
    optimizer = trained(options)
    wanted = copy.deepcopy(optimizer.full_state_dict())
    state = copy.deepcopy(wanted)
    for option in ("decoupled_weight_decay", "fused", "foreach", "capturable", "differentiable", "maximize"):
        state["param_groups"][0].pop(option, None)
    for own in state["state"].values():
        own["step"] = int(own["step"])
    optimizer.load_full_state_dict(state)
    assert same(optimizer.full_state_dict(), wanted)


def test_parameters_without_elements_need_no_state(caplog):
    model = torch.nn.Linear(4, 3)
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 5)))
    wrapper = wrap(SOLO, model, **SHARDED)
    optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters()), wrapper)
    backward(wrapper, 0)
    optimizer.step()
    with caplog.at_level(logging.WARNING):
        optimizer.load_full_state_dict(optimizer.full_state_dict())
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["Adafactor", "Muon", "SparseAdam"])
def test_an_optimizer_that_is_not_elementwise_loads_its_state_where_nothing_is_sharded(kind):
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this version of torch has no {kind}")
    model = torch.nn.Linear(4, 3, bias=False)
    wrapper = wrap(SOLO, model)
    optimizer = DataParallelOptimizer(getattr(torch.optim, kind)(model.parameters(), lr=1e-2), wrapper)
    if kind != "SparseAdam":
        optimizer.zero_grad()
        backward(wrapper, 0)
        optimizer.step()
    state = copy.deepcopy(optimizer.full_state_dict())
    optimizer.load_full_state_dict(state)
    assert same(optimizer.full_state_dict(), state)


def test_a_learning_rate_in_a_tensor_is_not_shared_with_a_state():
    optimizer = trained({})
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    state = optimizer.full_state_dict()
    other = trained({})
    other.load_full_state_dict(state)
    other.param_groups[0]["lr"].fill_(0.25)
    assert state["param_groups"][0]["lr"] == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5


class Derived(torch.optim.SGD):
    """An update that may not be elementwise."""


def test_a_class_derived_from_one_of_torch_must_say_that_it_is_elementwise():
    with pytest.raises(ArgumentError, match="must be elementwise to be sharded, which is not known of Derived"):
        trained(SHARDED, kind=Derived)
    trained({}, kind=Derived)
    trained(SHARDED, kind=type("Known", (Derived,), {"is_elementwise": True}))


def test_an_optimizer_that_needs_a_closure_is_refused():
    with pytest.raises(ArgumentError, match=r"^optimizer: its step\(\) must need no closure, but that of LBFGS does"):
        trained({}, kind=torch.optim.LBFGS)


@pytest.mark.parametrize("arguments", [("model", None), (None, "optimizer")])
def test_what_is_no_model_or_no_optimizer_is_refused(arguments):
    model = layers(4, 3)
    wrapper = wrap(SOLO, model)
    inner = torch.optim.AdamW(model.parameters())
    first, second = arguments
    with pytest.raises(
        ArgumentError, match=r"^(model must be a DistributedDataParallel|optimizer must be one of torch)"
    ):
        DataParallelOptimizer(first or inner, second or wrapper)


@pytest.mark.parametrize("options", WAYS)
def test_a_dynamic_loss_scale_is_part_of_the_full_state(options):
    optimizer = trained(options, dtype=torch.bfloat16, loss_scale="dynamic")
    optimizer._loss_scale.update(is_finite=False)
    state = optimizer.full_state_dict()
    assert state["loss_scale"] == {"scale": 32768.0, "good_steps": 0}
    other = trained(options, dtype=torch.bfloat16, loss_scale="dynamic")
    assert other.loss_scale == 65536.0
    other.load_full_state_dict(state)
    assert other.loss_scale == 32768.0
    fixed = trained(options, dtype=torch.bfloat16, loss_scale=8.0)
    fixed.load_full_state_dict(state)
    assert fixed.loss_scale == 8.0
    assert "loss_scale" not in fixed.full_state_dict()
    for damage in ({}, {"scale": 0.0, "good_steps": 1}, {"scale": 2.0, "good_steps": "x"}):
        with pytest.raises(ArgumentError, match="loss_scale must have a 'scale' from 1 to"):
            other.load_full_state_dict({**state, "loss_scale": damage})


@pytest.mark.parametrize("options", WAYS)
def test_the_state_of_parameters_that_are_frozen_for_a_while_is_kept(options):
    def frozen(state):
        model = layers(4, 3, 2)
        model[0].weight.requires_grad_(False)
        wrapper = wrap(SOLO, model, **options)
        optimizer = DataParallelOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), wrapper)
        optimizer.load_full_state_dict(state)
        backward(wrapper, 5)
        optimizer.step()
        return optimizer

    before = copy.deepcopy(trained(options).full_state_dict())
    optimizer = frozen(before)
    after = optimizer.full_state_dict()
    assert same(after["state"]["0.weight"], before["state"]["0.weight"])
    assert after["state"]["1.weight"]["step"] == 3
    optimizer.load_state_dict(copy.deepcopy(after))
    assert same(optimizer.full_state_dict(), after)
    trained(options).load_full_state_dict(after)


def test_the_state_of_an_optimizer_with_frozen_parameters_is_kept_when_it_is_wrapped():
    model = layers(4, 3, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    backward(model, 0)
    inner.step()
    model[0].weight.requires_grad_(False)
    optimizer = DataParallelOptimizer(inner, wrap(SOLO, model, **SHARDED))
    assert set(optimizer.full_state_dict()["state"]) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_the_state_of_another_parameter_is_refused():
    model = layers(4, 3, 2)
    inner = torch.optim.AdamW(model.parameters())
    inner.state[torch.nn.Parameter(torch.ones(7))] = {"step": torch.tensor(1.0)}
    with pytest.raises(ArgumentError, match=r"^optimizer: its states must be of .* but one of shape \[7\] is not"):
        DataParallelOptimizer(inner, wrap(SOLO, model))


def test_a_momentum_that_is_none_begins_anew_as_in_torch():
    optimizer = trained(SHARDED, kind=partial(torch.optim.SGD, momentum=0.9))
    state = optimizer.full_state_dict()
    state["state"]["0.weight"]["momentum_buffer"] = None
    optimizer.load_full_state_dict(state)
    optimizer.zero_grad()
    backward(optimizer.model, 5)
    optimizer.step()


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_of_16_bits_are_whole_on_every_rank_after_their_main_parameters_were_loaded(size):
    def work(group):
        def build(seed):
            model = layers(4, 300, 2, seed=seed).bfloat16()
            wrapper = wrap(group, model, use_distributed_optimizer=True)
            return model, DataParallelOptimizer(torch.optim.AdamW(model.parameters()), wrapper)

        model, optimizer = build(0)
        other, fresh = build(1)
        fresh.load_full_state_dict(optimizer.full_state_dict())
        for param, wanted in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(param, wanted)

    run_ranks(size, work)
