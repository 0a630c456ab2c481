"""The optimizer's steps, options and states."""

import math

import pytest
import torch

from tests.support.models.data_parallel import Case, loss_of, new_model, wrap
from trackbed.comm import run_ranks
from trackbed.errors import ArgumentError, GradientError
from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer, global_norm

SHARDED = {"use_distributed_optimizer": True, "bucket_size": 700}


def one_rank(optimizer_class=torch.optim.AdamW, dtype=torch.float32, options=None, **arguments):
    model = new_model(dtype)
    wrapper = DistributedDataParallel(None, DistributedDataParallelConfig(**(options or {})), model)
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    return wrapper, DataParallelOptimizer(optimizer, wrapper, **arguments)


def step(wrapper, optimizer, scale=1.0):
    optimizer.zero_grad()
    (loss_of(wrapper, 0, 1) * scale).backward()
    return optimizer.step()


def test_parameter_groups_stay_in_place_for_schedulers():
    model = new_model()
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.1},
        {"params": list(model.expert.parameters()), "weight_decay": 0.5},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(adamw, step_size=1, gamma=0.5)
    wrapper = DistributedDataParallel(None, DistributedDataParallelConfig(**SHARDED), model)
    optimizer = DataParallelOptimizer(adamw, wrapper)
    before = [dict(group, params=None) for group in adamw.param_groups]
    assert optimizer.param_groups is adamw.param_groups
    step(wrapper, optimizer)
    scheduler.step()
    assert [group["lr"] for group in adamw.param_groups] == [0.05, 0.1]
    assert [group["weight_decay"] for group in before] == [0.01, 0.5]


@pytest.mark.parametrize("options", [{}, SHARDED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_is_not_finite_skips_the_step_on_every_rank(options, dtype):
    case = Case(dtype, options=options)

    def run(group):
        wrapper, optimizer = wrap(group, case)
        before = {name: value.clone() for name, value in wrapper.state_dict().items()}
        optimizer.zero_grad()
        loss = loss_of(wrapper, group.rank, 1)
        (loss * math.nan if group.rank == 1 else loss).backward()
        report = optimizer.step()
        assert report.is_skipped
        assert math.isnan(report.norm)
        for name, value in wrapper.state_dict().items():
            assert torch.equal(value, before[name])
        assert not optimizer.optimizer.state

    run_ranks(2, run)


def test_a_dynamic_loss_scale_is_halved_by_an_overflow_and_doubled_after_many_steps():
    wrapper, optimizer = one_rank(loss_scale="dynamic")
    assert optimizer.loss_scale == 65536.0
    report = step(wrapper, optimizer, scale=math.inf)
    assert (report.is_skipped, report.loss_scale, optimizer.loss_scale) == (True, 65536.0, 32768.0)
    for _ in range(2000):
        optimizer._loss_scale.update(is_finite=True)
    assert optimizer.loss_scale == 65536.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_scale_of_a_power_of_two_changes_nothing(dtype):
    outcomes = []
    for scale in (None, 1024.0):
        wrapper, optimizer = one_rank(dtype=dtype, loss_scale=scale, max_norm=0.1)
        report = step(wrapper, optimizer, scale=scale or 1.0)
        outcomes.append([report.norm, *(value.clone() for value in wrapper.state_dict().values())])
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(one, other) for one, other in zip(outcomes[0][1:], outcomes[1][1:], strict=True))


@pytest.mark.parametrize("kind", ["Muon", "Adafactor"])
def test_an_update_that_is_not_elementwise_is_refused_if_sharded(kind):
    if not hasattr(torch.optim, kind):
        pytest.skip(f"this torch has no {kind}")
    model = new_model()
    wrapper = DistributedDataParallel(None, DistributedDataParallelConfig(**SHARDED), model)
    with pytest.raises(ArgumentError, match=f"must be elementwise to be sharded, which is not known of {kind}"):
        DataParallelOptimizer(getattr(torch.optim, kind)([model.first.weight]), wrapper)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam"])
def test_optimizers_of_torch_give_the_same_sharded_and_not(kind):
    found = []
    for options in ({}, SHARDED):
        case = Case(options=options)

        def run(group, case=case):
            model = new_model()
            config = DistributedDataParallelConfig(**case.options)
            wrapper = DistributedDataParallel(None, config, model, process_group=group)
            optimizer = DataParallelOptimizer(getattr(torch.optim, kind)(model.parameters(), lr=1e-3), wrapper)
            for number in range(3):
                optimizer.zero_grad()
                loss_of(wrapper, 2 * number + group.rank, 1).backward()
                optimizer.step()
            return {name: value.clone() for name, value in wrapper.state_dict().items()}

        found += run_ranks(2, run)
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(value, other[name]), name


def test_states_work_before_the_first_step():
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, SHARDED):
            wrapper, optimizer = one_rank(dtype=dtype, options=options)
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.load_full_state_dict(optimizer.full_state_dict())
            step(wrapper, optimizer)


def test_the_state_continues_to_the_bit():
    case = Case(torch.bfloat16, options={**SHARDED, "grad_reduce_in_fp32": True})

    def run(group):
        wrapper, optimizer = wrap(group, case)
        other_wrapper, other = wrap(group, case)
        step(wrapper, optimizer)
        other.load_state_dict(optimizer.state_dict())
        other_wrapper.load_state_dict(wrapper.state_dict())
        for each in ((wrapper, optimizer), (other_wrapper, other)):
            step(*each)
        for name, value in wrapper.state_dict().items():
            assert torch.equal(value, other_wrapper.state_dict()[name]), name

    run_ranks(2, run)


def test_a_state_of_other_parameters_is_refused():
    _, optimizer = one_rank()
    state = optimizer.full_state_dict()
    state["param_groups"][0]["params"][0] = "something"
    with pytest.raises(ArgumentError, match="the parameter groups must be"):
        optimizer.load_full_state_dict(state)
    state = optimizer.full_state_dict()
    state["state"]["first.weight"] = {"step": torch.zeros(()), "exp_avg": torch.zeros(3)}
    with pytest.raises(ArgumentError, match=r"'exp_avg' of first.weight must have the shape \[50, 24\], but has \[3\]"):
        optimizer.load_full_state_dict(state)


@pytest.mark.parametrize(
    "arguments",
    [{"max_norm": value} for value in (0.0, -1.0, 1e-40, math.nan, True, "1")]
    + [{"loss_scale": value} for value in (0.0, "big", 1e-40, 1e39, math.inf, True)],
)
def test_arguments_out_of_range_are_refused(arguments):
    with pytest.raises(ArgumentError, match=f"^{next(iter(arguments))} must be"):
        one_rank(**arguments)


def test_a_parameter_that_the_model_does_not_have_is_refused():
    model = new_model()
    wrapper = DistributedDataParallel(None, DistributedDataParallelConfig(), model)
    stranger = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"number 0 of group 0, of shape \[3\], is not"):
        DataParallelOptimizer(torch.optim.SGD([stranger], lr=1.0), wrapper)


def test_a_missing_gradient_is_an_error_of_the_step_with_overlap():
    wrapper, optimizer = one_rank(options={**SHARDED, "overlap_grad_reduce": True})
    optimizer.zero_grad()
    wrapper.module.first(torch.ones(1, 24)).sum().backward()
    with pytest.raises(GradientError, match=r"expert.bias in bucket \d"):
        optimizer.step()


def test_the_step_is_clipped_as_torch_clips_up_to_rounding():
    wrapper, optimizer = one_rank(torch.optim.SGD, max_norm=0.1)
    plain = new_model()
    loss_of(plain, 0, 1).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.optim.SGD(plain.parameters(), lr=1e-2).step()
    report = step(wrapper, optimizer)
    assert report.norm == pytest.approx(float(norm), rel=1e-6)
    for one, other in zip(wrapper.module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-8)


def test_parameters_of_16_bits_that_are_loaded_or_broadcast_are_those_that_are_updated():
    case = Case(torch.bfloat16, options={**SHARDED, "grad_reduce_in_fp32": True})

    def run(group):
        wrapper, optimizer = wrap(group, case)
        with torch.no_grad():
            for parameter in wrapper.module.parameters():
                parameter += group.rank + 1
        wrapper.broadcast_params()
        expected = {name: value.clone() for name, value in wrapper.state_dict().items()}
        step(wrapper, optimizer)
        for name, value in wrapper.state_dict().items():
            assert (value - expected[name]).abs().max() < 0.05, name
        zeros = {name: torch.zeros_like(value) for name, value in wrapper.state_dict().items()}
        wrapper.module.load_state_dict(zeros)
        step(wrapper, optimizer)
        assert all(value.abs().max() < 0.05 for value in wrapper.state_dict().values())

    run_ranks(2, run)


def test_the_copies_of_parameters_that_round_to_what_is_loaded_keep_their_bits():
    case = Case(torch.bfloat16, options={"grad_reduce_in_fp32": True})
    wrapper, optimizer = wrap(None, case)
    step(wrapper, optimizer)
    before = optimizer.full_state_dict()["state"]["first.weight"]["main_param"].clone()
    assert not torch.equal(before, before.bfloat16().float())
    wrapper.load_state_dict({name: value.clone() for name, value in wrapper.state_dict().items()})
    assert torch.equal(optimizer.full_state_dict()["state"]["first.weight"]["main_param"], before)


def test_a_step_needs_new_gradients_and_the_last_optimizer():
    wrapper, optimizer = one_rank()
    step(wrapper, optimizer)
    with pytest.raises(GradientError, match=r"zero_grad\(\) must be called before another step\(\)"):
        optimizer.step()
    newer = DataParallelOptimizer(torch.optim.SGD(wrapper.module.parameters(), lr=1.0), wrapper)
    optimizer.zero_grad()
    loss_of(wrapper, 1, 1).backward()
    with pytest.raises(GradientError, match="the optimizer must be the last one of the model, but is another"):
        optimizer.step()
    assert newer.step().norm > 0


def test_a_parameter_group_that_is_added_later_is_refused():
    wrapper, optimizer = one_rank()
    optimizer.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ArgumentError, match="its parameter groups must stay as they are"):
        step(wrapper, optimizer)


@pytest.mark.parametrize("options", [{}, SHARDED])
def test_a_parameter_that_is_frozen_later_stays_as_it_is(options):
    wrapper, optimizer = one_rank(options=options)
    step(wrapper, optimizer)
    bias = wrapper.module.first.bias
    before, other = bias.clone(), wrapper.module.first.weight.clone()
    bias.requires_grad_(False)
    step(wrapper, optimizer)
    assert torch.equal(bias, before)
    assert not torch.equal(wrapper.module.first.weight, other)


def test_a_parameter_that_is_unfrozen_later_or_moved_is_refused():
    for change, words in (
        (lambda model: model.frozen.requires_grad_(True), r"frozen\.weight must stay frozen"),
        (lambda model: model.double(), "must stay where it was, but was replaced"),
        (lambda model: setattr(model.norm.bias, "data", torch.zeros(50)), "data of norm.bias must stay where it was"),
    ):
        for options in ({}, SHARDED):
            wrapper, optimizer = one_rank(options=options)
            step(wrapper, optimizer)
            optimizer.zero_grad()
            change(wrapper.module)
            with pytest.raises(GradientError, match=f"rank 0: .*{words}.*wrap the model again"):
                optimizer.step()


def test_a_state_in_another_type_is_cast_to_that_of_the_copies():
    wrapper, optimizer = one_rank(dtype=torch.bfloat16)
    step(wrapper, optimizer)
    state = optimizer.full_state_dict()
    state["state"]["first.weight"]["exp_avg"] = state["state"]["first.weight"]["exp_avg"].bfloat16()
    optimizer.load_full_state_dict(state)
    assert {value["exp_avg"].dtype for value in optimizer.optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.complex64])
def test_the_norm_of_other_types_is_refused(dtype):
    with pytest.raises(ArgumentError, match=f"but one is of {dtype}"):
        global_norm([torch.ones(2, dtype=dtype)])
