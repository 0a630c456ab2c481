"""States of a bucket group, of one rank."""

import sys
import types
import warnings

import pytest
import torch

from tests.support.models.buffers import Ranks, new_buffer, parameters
from trackbed.errors import GradientError
from trackbed.grads import partition_buckets
from trackbed.grads.gradient_check import NormHistory, choose_judge
from trackbed.megatron.rerun import RerunJudge

OVERLAP = {"overlap_grad_reduce": True}


def new_group(**options):
    """A group of one bucket with two parameters, p0 and p1."""
    params = parameters((2,), (3,))
    (group,) = partition_buckets([new_buffer(params, factor=0.5, **options)])
    return group, params


def arrive(group, *params):
    for param in params:
        param.main_grad += 1
        group.register_grad_ready(param)


def test_a_group_has_megatrons_attributes():
    group, params = new_group(use_distributed_optimizer=True)
    assert group.params == set(params)
    assert group.param_to_bucket == dict.fromkeys(params, group.buckets[0])
    assert group.intra_distributed_optimizer_instance_group == Ranks()
    assert group.intra_distributed_optimizer_instance_size == 1
    assert group.intra_distributed_optimizer_instance_rank == 0
    assert (group.is_last_microbatch, group.is_first_batch, group.param_gather_dispatched) == (True, True, False)
    assert (group.grad_reduce_handle, group.param_gather_handle, group.next_param_gather_bucket_group) == (None,) * 3
    assert (group.per_param_grad_ready_counts, group.golden_per_param_grad_ready_counts) == ({}, {})
    assert new_group()[0].data_parallel_group == Ranks()


def test_a_group_of_several_ranks_that_cannot_communicate_is_refused():
    params = parameters((2,), (3,))
    (group,) = partition_buckets([new_buffer(params, Ranks(1, 2), use_distributed_optimizer=True)])
    for method in (group.start_grad_sync, group.start_param_sync):
        with pytest.raises(GradientError, match="bucket 0: its group of 2 ranks must be a process group of torch"):
            method()


def test_without_overlap_a_reduction_needs_no_gradients():
    group, params = new_group()
    params[0].main_grad.fill_(4)
    group.finish_grad_sync()
    assert params[0].main_grad.tolist() == [2.0, 2.0]
    with pytest.raises(GradientError, match=r"register_grad_ready\(\) must be called with overlap_grad_reduce=True"):
        group.register_grad_ready(params[0])


def test_the_first_step_counts_gradients_and_later_steps_expect_as_many():
    group, (first, second) = new_group(**OVERLAP)
    arrive(group, first, second, second)
    assert group.per_param_grad_ready_counts == {first: 1, second: 2}
    assert not group.is_issued
    group.finish_grad_sync()
    assert second.main_grad.tolist() == [1.0] * 3
    group.reset()
    assert not group.is_first_batch
    assert group.golden_per_param_grad_ready_counts == {first: 1, second: 2}
    assert group.per_param_grad_ready_counts == {}
    arrive(group, second, first)
    assert not group.is_issued
    arrive(group, second)
    assert group.is_issued
    group.finish_grad_sync()


@pytest.mark.parametrize("learns", [True, False])
def test_a_first_step_that_was_not_reduced_tells_how_many_gradients_to_expect_where_that_is_asked_for(learns):
    group, (first, second) = new_group(**OVERLAP)
    group.learns_from_dropped_steps = learns
    arrive(group, first, second, second)
    group.reset()
    assert group.is_first_batch is not learns
    assert group.golden_per_param_grad_ready_counts == ({first: 1, second: 2} if learns else {})


def test_gradients_of_other_micro_batches_do_not_count():
    group, params = new_group(**OVERLAP)
    group.is_last_microbatch = False
    arrive(group, *params)
    assert group.per_param_grad_ready_counts == {}
    group.is_last_microbatch = True
    arrive(group, *params)
    assert group.per_param_grad_ready_counts == dict.fromkeys(params[::-1], 1)


def test_a_gradient_after_the_reduction_is_refused_by_name():
    group, (first, second) = new_group(**OVERLAP)
    for _ in range(2):
        group.reset()
        arrive(group, first, second)
        group.finish_grad_sync()
    with pytest.raises(GradientError, match=r"rank 0: .* one of p1 arrived after bucket 0 was") as caught:
        group.register_grad_ready(second)
    assert isinstance(caught.value, AssertionError)


def test_missing_gradients_are_refused_from_the_second_step_on():
    group, (first, second) = new_group(**OVERLAP)
    arrive(group, first, second)
    group.finish_grad_sync()
    group.reset()
    arrive(group, first)
    assert group.missing() == ["p1"]
    with pytest.raises(GradientError, match=r"but only those of 1 of 2 have"):
        group.finish_grad_sync()


def test_operations_out_of_order_are_refused():
    group, params = new_group(**OVERLAP)
    arrive(group, *params)
    group.finish_grad_sync()
    with pytest.raises(GradientError, match=r"zero_grad_buffer\(\) must be called before another finish_grad_sync"):
        group.finish_grad_sync()
    group.reset()
    arrive(group, *params)
    with pytest.raises(GradientError, match=r"finish_grad_sync\(\) must be called before another start_grad_sync"):
        group.start_grad_sync()
    with pytest.raises(GradientError, match="the parameter must be in the bucket group, but is not"):
        group.register_grad_ready(torch.nn.Parameter(torch.zeros(1)))


def test_a_reset_drops_what_was_counted_and_keeps_what_is_expected():
    group, (first, second) = new_group(**OVERLAP)
    arrive(group, first, second)
    group.finish_grad_sync()
    group.reset()
    arrive(group, first)
    group.reset()
    assert group.golden_per_param_grad_ready_counts == {first: 1, second: 1}
    arrive(group, first)
    assert not group.is_issued
    arrive(group, second)
    assert group.is_issued


def test_only_a_sharded_group_gathers_parameters():
    group, _ = new_group()
    for method in (group.start_param_sync, group.finish_param_sync):
        with pytest.raises(GradientError, match="must be called with use_distributed_optimizer=True only"):
            method()
    group, _ = new_group(use_distributed_optimizer=True)
    group.start_param_sync()
    assert group.param_gather_dispatched
    with pytest.raises(GradientError, match=r"finish_param_sync\(\) must be called with overlap_param_gather=True"):
        group.finish_param_sync()


@pytest.mark.parametrize("skips", [False, True])
def test_the_end_of_a_gather_begins_the_next_unless_told_otherwise(skips):
    buffer = new_buffer(
        parameters((2,), (3,)), bucket_size=1, use_distributed_optimizer=True, overlap_param_gather=True
    )
    first, second = partition_buckets([buffer])
    second.next_param_gather_bucket_group = first
    second.finish_param_sync(skip_next_bucket_dispatch=skips)
    assert (second.param_gather_dispatched, first.param_gather_dispatched) == (True, not skips)
    second.finish_param_sync()
    assert first.param_gather_dispatched is not skips


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("-inf"), "infinite")])
def test_a_gradient_that_is_not_finite_is_refused_by_name(value, kind):
    group, (first, _) = new_group(check_for_nan_in_grad=True)
    first.main_grad[1] = value
    with pytest.raises(GradientError, match=f"rank 0: .* that of p0 in bucket 0 is {kind}: its norm is"):
        group.start_grad_sync()
    assert not group.is_issued


def test_a_far_larger_norm_is_a_warning_after_a_hundred_others(caplog):
    group, (first, _) = new_group(check_for_large_grads=True)
    for value in [1.0] * 100 + [9.0, 1000.0]:
        group.reset()
        first.main_grad.fill_(value)
        group.start_grad_sync()
    # Where megatron-core is loaded, its rerun state machine says something of its own.
    (record,) = [record for record in caplog.records if record.name.startswith("trackbed.")]
    assert "bucket 0: the norm of its gradients is 1414.21, over 10 times the largest so far, 12.7279" in record.message


def test_a_norm_that_is_not_finite_is_no_measure_for_others():
    history = NormHistory()
    assert not any(history.is_large(norm) for norm in [1.0] * 50 + [float("inf")] + [2.0] * 50)
    assert history.is_large(21.0)
    assert not history.is_large(20.0)


def test_several_optimizers_cannot_accumulate_in_fp32():
    with pytest.raises(GradientError, match="needs num_distributed_optimizer_instances = 1, but that is 2"):
        new_group(
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=2,
            reduce_scatter_with_fp32_accumulation=True,
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_is_a_runtime_error_and_an_assertion_error(value):
    group, params = new_group()
    params[1].main_grad[2] = value
    for kind in (GradientError, RuntimeError, AssertionError):
        with pytest.raises(kind, match="rank 0: gradients must be finite, but that of p1 in bucket 0 is"):
            group.check_grads(True, False)
    group.check_grads(False, False)


class Machine:
    """A rerun state machine that notes what it is asked, and refuses or has the step run again."""

    def __init__(self, *, refuses):
        self.refuses = refuses
        self.asked = []

    def validate_result(self, *, result, rejection_func, message, tolerance, fatal):
        is_rejected = bool(rejection_func(result))
        self.asked.append((float(result), message.partition(" bucket")[0], is_rejected, fatal))
        if is_rejected and fatal and self.refuses:
            raise RuntimeError(f"Unexpected result {result}")

    def is_unexpectedly_large(self, result, threshold, context):
        return float(result) > threshold and context == "grads"


@pytest.fixture
def machine_of(monkeypatch):
    """Makes a machine the one of Megatron Core, as if that were loaded."""

    def use(machine):
        module = types.SimpleNamespace(get_rerun_state_machine=lambda: machine)
        monkeypatch.setitem(sys.modules, "megatron.core.rerun_state_machine", module)
        choose_judge(RerunJudge())
        return machine

    yield use
    choose_judge(None)


def test_the_rerun_state_machine_is_asked_about_each_norm(machine_of):
    machine = machine_of(Machine(refuses=True))
    group, params = new_group()
    params[0].main_grad.fill_(16)
    group.check_grads(True, True)
    norm = 2**0.5 * 16
    assert [asked[1:] for asked in machine.asked] == [
        ("found NaN in local grad norm for", False, True),
        ("found Inf in local grad norm for", False, True),
        ("found unexpected large grads in", True, False),
    ]
    assert [asked[0] for asked in machine.asked] == [pytest.approx(norm)] * 3


def test_what_the_rerun_state_machine_refuses_is_our_error(machine_of):
    machine_of(Machine(refuses=True))
    group, params = new_group(check_for_nan_in_grad=True)
    params[0].main_grad[0] = float("nan")
    with pytest.raises(RuntimeError, match="rank 0: gradients must be finite, but that of p0") as caught:
        group.start_grad_sync()
    assert "Unexpected result" in str(caught.value.__cause__)


def test_a_step_that_the_rerun_state_machine_has_run_again_is_no_error(machine_of):
    machine = machine_of(Machine(refuses=False))
    group, params = new_group(check_for_nan_in_grad=True)
    params[0].main_grad[0] = float("inf")
    group.start_grad_sync()
    assert [asked[2] for asked in machine.asked] == [False, True]


def test_a_machine_without_a_gpu_that_cannot_warn_of_a_large_norm_leaves_it_to_us(machine_of, caplog):
    class WithoutGpu(Machine):
        def validate_result(self, *, result, rejection_func, **options):
            super().validate_result(result=result, rejection_func=rejection_func, **options)
            if rejection_func(result):
                raise AssertionError("Torch not compiled with CUDA enabled")

    machine_of(WithoutGpu(refuses=True))
    group, params = new_group()
    for value in [1.0] * 100 + [1000.0]:
        params[0].main_grad.fill_(value)
        group.check_grads(True, True)
    assert "over 10 times the largest so far" in caplog.text


def test_a_failure_of_the_rerun_state_machine_over_finite_gradients_is_its_own(machine_of):
    class Unready(Machine):
        def validate_result(self, **_options):
            raise AssertionError("outside of the forward-backward pass")

    machine_of(Unready(refuses=True))
    with pytest.raises(AssertionError, match=r"^outside of the forward-backward pass$"):
        new_group()[0].check_grads(True, False)


def chained():
    """Two groups with sharded parameters, of which the second is to be gathered after the first."""
    options = {"use_distributed_optimizer": True, "overlap_param_gather": True, **OVERLAP}
    groups = partition_buckets([new_buffer(parameters((2,), (3,)), bucket_size=1, **options)])
    first, second = groups[::-1]
    first.next_param_gather_bucket_group = second
    return first, second


def test_a_gather_that_has_begun_before_its_turn_is_a_warning():
    first, second = chained()
    second.start_param_sync()
    first.start_param_sync()
    with pytest.warns(UserWarning, match=r"bucket \d: .* but their gather has already begun"):
        first.finish_param_sync()


@pytest.mark.parametrize("skips", [False, True])
def test_gathers_in_their_order_and_one_that_is_left_alone_give_no_warning(skips):
    first, second = chained()
    if skips:
        second.start_param_sync()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first.finish_param_sync(skip_next_bucket_dispatch=skips)
    assert second.param_gather_dispatched
