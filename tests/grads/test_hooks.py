"""Parameters that are gathered while the next forward pass runs: no stale one is ever read."""

import copy
import itertools

import pytest
import torch
from torch import nn

from tests.support.models.wrapped import backward, inputs, layers, wrap
from trackbed.comm import run_ranks
from trackbed.errors import GradientError
from trackbed.grads.hooks import modules_to_hook

OPTIONS = {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "bucket_size": 10}
GATHER = {**OPTIONS, "overlap_param_gather": True}


def update(wrapper, value):
    """Sets this rank's shard of all parameters, and nothing else, to a value; NaN stands in the other shards."""
    for buffer in wrapper.buffers:
        for bucket in buffer.buckets:
            rank, size = buffer.data_parallel_group.rank(), buffer.data_parallel_world_size
            shards = bucket.param_data.chunk(size)
            for number, shard in enumerate(shards):
                shard.fill_(value if number == rank else float("nan"))


def step(wrapper, value):
    """One training step, after which the shards are new but not yet gathered."""
    wrapper.zero_grad_buffer()
    backward(wrapper, 1)
    wrapper.finish_grad_sync()
    update(wrapper, value)


def all_are(wrapper, value):
    return all((param == value).all() for param in wrapper.module.parameters())


def test_each_module_waits_for_its_parameters_and_the_next_gather_runs():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 3, 2), **GATHER)
        seen = []
        for module in wrapper.module:
            module.register_forward_pre_hook(lambda module, args: seen.append(bool((module.weight == 0.5).all())))
        for _ in range(3):
            step(wrapper, 0.5)
            seen.clear()
            output = wrapper(inputs(1))
            assert seen == [True] * 3
            assert torch.isfinite(output).all()
        step(wrapper, 0.25)
        wrapper.start_param_sync()  # as an optimizer does
        assert wrapper(inputs(1)).isfinite().all()
        assert all_are(wrapper, 0.25)

    run_ranks(3, work)


def test_without_overlap_a_gather_is_over_at_once():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **OPTIONS)
        update(wrapper, 2.0)
        wrapper.start_param_sync()
        assert all_are(wrapper, 2.0)

    run_ranks(2, work)


def test_a_gather_may_be_forced_again_and_again():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **GATHER)
        for value in (1.0, 2.0, 3.0):
            step(wrapper, value)
            wrapper.start_param_sync()
            for _ in range(3):
                wrapper.start_param_sync(force_sync=True)
                assert all_are(wrapper, value)

    run_ranks(2, work)


def test_a_second_gather_is_refused_while_one_runs():
    wrapper = wrap(None, layers(4, 2), **GATHER)
    wrapper.start_param_sync()
    with pytest.raises(GradientError, match=r"finish_param_sync\(\) must be called before another start"):
        wrapper.start_param_sync()
    wrapper.start_param_sync(force_sync=True)


@pytest.mark.parametrize("read", [lambda wrapper: wrapper.state_dict(), lambda wrapper: wrapper.module.state_dict()])
def test_the_state_waits_for_parameters_that_are_under_way(read):
    def work(group):
        wrapper = wrap(group, layers(4, 30, 30, 2), **GATHER)
        for value in (1.0, 2.0, 3.0):
            step(wrapper, value)
            wrapper.start_param_sync()
            assert all((tensor == value).all() for tensor in read(wrapper).values())

    run_ranks(2, work)


def test_hooks_can_be_removed_and_put_back():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **GATHER)
        step(wrapper, 1.0)
        wrapper.disable_forward_pre_hook()
        assert all_are(wrapper, 1.0)
        assert wrapper.remove_forward_pre_hook_handles == {}
        with pytest.raises(GradientError, match=r"enable_forward_pre_hook\(\) must be called before another disable"):
            wrapper.disable_forward_pre_hook()
        wrapper(inputs(1))
        wrapper.enable_forward_pre_hook()
        with pytest.raises(GradientError, match=r"disable_forward_pre_hook\(\) must be called before another enable"):
            wrapper.enable_forward_pre_hook()
        step(wrapper, 2.0)
        wrapper.disable_forward_pre_hook(param_sync=False)
        assert not all_are(wrapper, 2.0)
        wrapper.start_param_sync(force_sync=True)
        assert all_are(wrapper, 2.0)

    run_ranks(2, work)


@pytest.mark.parametrize("method", ["enable_forward_pre_hook", "disable_forward_pre_hook"])
def test_there_are_no_hooks_without_overlap_of_the_gather(method):
    wrapper = wrap(None, layers(4, 2), **OPTIONS)
    assert not wrapper.use_forward_hook
    with pytest.raises(GradientError, match=rf"{method}\(\) must be called with overlap_param_gather=True"):
        getattr(wrapper, method)()


def test_a_gather_needs_a_sharded_optimizer():
    with pytest.raises(GradientError, match=r"start_param_sync\(\) must be called with use_distributed_optimizer=True"):
        wrap(None, layers(4, 2)).start_param_sync()


def test_an_optimizer_step_may_keep_gathers_back():
    def work(group):
        wrapper = wrap(group, layers(4, 2), **GATHER)
        step(wrapper, 2.0)
        wrapper.overlap_param_gather_with_optimizer_step = True
        wrapper.start_param_sync()
        assert not any(one.param_gather_dispatched for one in wrapper.bucket_groups)
        wrapper.start_param_sync(force_dispatch=True)
        wrapper.wait_for_params()
        assert all_are(wrapper, 2.0)

    run_ranks(2, work)


def test_modules_in_another_order_get_their_parameters_too():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([layers(4, 4, seed=seed) for seed in range(3)])
            self.order = [0, 1, 2]

        def forward(self, x):
            for number in self.order:
                x = self.parts[number](x)
            return x

    def work(group):
        wrapper = wrap(group, Branches(), **{**GATHER, "bucket_size": 1})
        for order in itertools.permutations(range(3)):
            step(wrapper, 0.5)
            # Each rank has an order of its own: gathers must begin in one order all the same.
            wrapper.module.order = order if group.rank else order[::-1]
            assert wrapper(inputs(1)).isfinite().all()

    run_ranks(2, work)


def test_a_compiled_module_waits_for_all_its_parameters():
    model = nn.Sequential(layers(4, 3), layers(3, 2))
    model[1].compile(backend="eager")
    found = {module: len(params) for module, params, _ in modules_to_hook(model)}
    assert found == {model: 0, model[0]: 0, model[0][0]: 2, model[1]: 2}
    whole = torch.compile(model, backend="eager")
    assert [len(params) for _, params, _ in modules_to_hook(whole)] == [4]


def test_parameters_that_are_read_without_their_module_are_never_stale():
    class Reads(nn.Module):
        """Uses the weight of a layer that it does not call, and attention, which does the same inside."""

        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.attention(x, x, x)[0] @ self.layer.weight

    def work(group):
        model = Reads()
        wrapper = wrap(group, model, **GATHER)
        for _ in range(3):
            wrapper.zero_grad_buffer()
            (wrapper(torch.ones(1, 2, 4)).sum() + model.layer.bias.sum()).backward()
            wrapper.finish_grad_sync()
            update(wrapper, 0.5)
            wrapper.start_param_sync()  # as an optimizer does
            assert (model.layer.weight == 0.5).all()
            assert all((param == 0.5).all() for param in model.parameters())
            update(wrapper, 0.25)
            wrapper.wait_for_params()
            wrapper.start_param_sync()
            assert wrapper(torch.ones(1, 2, 4)).isfinite().all()
        assert type(copy.deepcopy(model).layer._parameters) is dict
        wrapper.disable_forward_pre_hook()
        assert type(model.layer._parameters) is dict

    run_ranks(2, work)
