"""Traps that Megatron Core's users fall into, by their number in section E of the reference. Each is one here no more.

9 and 11 to 13 concern checkpoints, devices and tuning.
"""

import contextlib
import itertools

import pytest
import torch

from tests.support.models.wrapped import backward, check, gradients, layers, wrap
from trackbed.comm import run_ranks
from trackbed.errors import CollectiveError, GradientError
from trackbed.grads.collectives import torch as torch_collectives
from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 10}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def run_step(wrapper, group, numbers):
    """Runs micro-batches of this rank, all of them outside `no_sync`."""
    wrapper.zero_grad_buffer()
    for number in numbers:
        backward(wrapper, number)
    wrapper.finish_grad_sync()


@pytest.mark.parametrize("sharded", [False, True])
def test_trap_1_fewer_backward_passes_than_in_the_step_before_give_the_right_sum(sharded):
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), use_distributed_optimizer=sharded, **OVERLAP)
        for count in (3, 1, 1, 2, 1):
            # The number of backward passes grows only where it is announced by a pass inside no_sync.
            numbers = [2 * micro + group.rank for micro in range(count)]
            wrapper.zero_grad_buffer()
            with wrapper.no_sync():
                for number in numbers[:-1]:
                    backward(wrapper, number)
            backward(wrapper, numbers[-1])
            wrapper.finish_grad_sync()
            check(wrapper, gradients(layers(4, 3, 2), 2, range(2 * count)))

    run_ranks(2, work)


def test_trap_1_without_no_sync_fewer_backward_passes_give_the_right_sum_too():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **OVERLAP)
        for count in (3, 3, 2, 1, 1):
            run_step(wrapper, group, [2 * micro + group.rank for micro in range(count)])
            check(wrapper, gradients(layers(4, 3, 2), 2, range(2 * count)))

    run_ranks(2, work)


def test_trap_1_more_backward_passes_are_an_error_before_the_sum_is_used():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **OVERLAP)
        run_step(wrapper, group, [group.rank, 2 + group.rank])
        with pytest.raises(GradientError, match=r"rank \d: .* one of .* arrived after bucket \d was"):
            run_step(wrapper, group, [group.rank, 2 + group.rank, 4 + group.rank])
        run_step(wrapper, group, [group.rank, 2 + group.rank])
        check(wrapper, gradients(layers(4, 3, 2), 2, range(4)))

    run_ranks(2, work)


def test_trap_2_a_parameter_without_a_gradient_is_named():
    def work(group):
        model = layers(4, 3, 2)
        model.unused = torch.nn.Parameter(torch.zeros(3))
        wrapper = wrap(group, model, **OVERLAP)
        for _ in range(2):
            wrapper.zero_grad_buffer()
            with pytest.raises(GradientError, match=rf"rank {group.rank}: .* but unused in bucket 2 has none"):
                run_step(wrapper, group, [group.rank])

    run_ranks(2, work)


def test_trap_2_a_parameter_that_was_used_before_is_named_too():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **OVERLAP)
        run_step(wrapper, group, [group.rank])
        wrapper.zero_grad_buffer()
        wrapper.module[0](torch.ones(4)).sum().backward()
        with pytest.raises(GradientError, match=r"1\.weight in bucket 0 and 1 other have none|1\.bias in bucket 0"):
            wrapper.finish_grad_sync()

    run_ranks(2, work)


@pytest.mark.parametrize("failing", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_trap_3_after_an_exception_in_backward_the_next_step_is_right_or_refused(failing, layer):
    def work(group):
        wrapper = wrap(group, layers(4, 3, 3, 2), **OVERLAP)
        broken = [False]

        def break_down(gradient):
            if broken[0]:
                raise ZeroDivisionError
            return gradient

        wrapper.module[layer].register_forward_hook(
            lambda module, args, output: output.register_hook(break_down) and None
        )
        run_step(wrapper, group, [group.rank])
        wrapper.zero_grad_buffer()
        broken[0] = group.rank in failing
        with contextlib.suppress(ZeroDivisionError):
            backward(wrapper, 2 + group.rank)
        broken[0] = False
        with contextlib.suppress(GradientError, CollectiveError):
            run_step(wrapper, group, [4 + group.rank])
            return wrapper
        return None

    for wrapper in run_ranks(2, work, timeout_seconds=1):
        if wrapper is not None:
            check(wrapper, gradients(layers(4, 3, 3, 2), 2, [4, 5]))


def test_trap_4_nested_no_sync_does_not_reduce():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **OVERLAP)
        for _ in range(3):
            wrapper.zero_grad_buffer()
            with wrapper.no_sync():
                with wrapper.no_sync():
                    backward(wrapper, group.rank)
                backward(wrapper, 2 + group.rank)
                assert not any(one.is_issued for one in wrapper.bucket_groups)
            backward(wrapper, 4 + group.rank)
            wrapper.finish_grad_sync()
            check(wrapper, gradients(layers(4, 3, 2), 2, range(6)))

    run_ranks(2, work)


def test_trap_5_the_callers_options_stay_as_they_are():
    config = DistributedDataParallelConfig(bucket_size=10)
    wrapper = DistributedDataParallel(None, config, layers(4, 3, 2))
    assert config == DistributedDataParallelConfig(bucket_size=10)
    assert wrapper.ddp_config.bucket_size is None


def test_trap_6_a_nan_is_reported_with_its_parameter_and_its_bucket():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 3, 2), check_for_nan_in_grad=True, **OVERLAP)
        wrapper.module[0].weight.register_hook(lambda gradient: gradient * float("nan"))
        with pytest.raises(GradientError, match=rf"rank {group.rank}: .* that of 0.weight in bucket 2 is NaN"):
            run_step(wrapper, group, [group.rank])

    run_ranks(2, work)


def test_trap_7_accumulation_in_fp32_is_an_option_of_one_wrapper_alone():
    before = dict(vars(torch_collectives))
    first = wrap(None, layers(4, 2), use_distributed_optimizer=True, reduce_scatter_with_fp32_accumulation=True)
    second = wrap(None, layers(4, 2), use_distributed_optimizer=True, average_in_collective=True)
    assert vars(torch_collectives) == before
    for wrapper in (second, first):
        run_step(wrapper, None, [1])
        check(wrapper, gradients(layers(4, 2), 1, [1]))


def test_trap_8_the_norm_does_not_depend_on_the_layout():
    def norm(size, options):
        def work(group):
            wrapper = wrap(group, layers(4, 30, 30, 2), **options)
            optimizer = DataParallelOptimizer(torch.optim.AdamW(wrapper.module.parameters()), wrapper, max_norm=1e-3)
            optimizer.zero_grad()
            backward(wrapper, 1)  # the same on every rank
            return optimizer.step().norm

        return set(run_ranks(size, work))

    ways = [
        {"use_distributed_optimizer": sharded, "overlap_grad_reduce": True, "bucket_size": bucket_size}
        for sharded, bucket_size in itertools.product((False, True), (1, 100, None))
    ]
    assert len(set.union(*(norm(size, options) for size in (1, 2, 4) for options in ways))) == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_trap_10_the_optimizers_state_can_be_saved_and_loaded_before_the_first_step(sharded):
    def new(group):
        wrapper = wrap(group, layers(4, 3, 2), use_distributed_optimizer=sharded)
        return wrapper, DataParallelOptimizer(torch.optim.AdamW(wrapper.module.parameters()), wrapper)

    def run(wrapper, optimizer, group):
        optimizer.zero_grad()
        backward(wrapper, group.rank)
        optimizer.step()
        wrapper.start_param_sync(force_sync=True) if sharded else None
        return [param.tolist() for param in wrapper.module.parameters()]

    def work(group):
        (one, first), (other, second) = new(group), new(group)
        second.load_state_dict(first.state_dict())
        state = first.full_state_dict()
        second.load_full_state_dict(state)
        assert run(one, first, group) == run(other, second, group)

    run_ranks(2, work)
