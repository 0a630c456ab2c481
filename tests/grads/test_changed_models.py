"""Models that programs change, copy or use in other ways around the wrapper."""

import copy
import gc
import io
import pickle
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.models.wrapped import backward, inputs, layers, wrap
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import ArgumentError, CollectiveError, GradientError
from trackbed.optim import DataParallelOptimizer

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 10}
GATHER = {**OVERLAP, "use_distributed_optimizer": True, "overlap_param_gather": True}
SHARDED_ONLY = {"use_distributed_optimizer": True}
WAYS = [{}, OVERLAP, SHARDED_ONLY, GATHER]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def plain(model, steps=3):
    """Parameters after some steps of plain torch."""
    train(model, adamw(model), steps)
    return [param.detach().clone() for param in model.parameters()]


def optimized(group, model, **options):
    wrapper = wrap(group, model, **options)
    return wrapper, DataParallelOptimizer(adamw(model), wrapper)


def assert_equal(params, wanted):
    for param, own in zip(params, wanted, strict=True):
        assert torch.equal(param.detach(), own)


@pytest.mark.parametrize("options", WAYS)
def test_gradients_from_before_wrapping_are_dropped(options):
    model = layers(4, 3, 2)
    backward(model, 7)
    wrapper, optimizer = optimized(SOLO, model, **options)
    train(wrapper, optimizer)
    wrapper.wait_for_params()
    assert_equal(model.parameters(), plain(layers(4, 3, 2)))


@pytest.mark.parametrize("options", WAYS)
def test_gradients_that_a_failed_backward_pass_has_left_are_dropped_by_zero_grad(options):
    fails = [True]

    def hook(param):
        if fails[0]:
            raise RuntimeError("hook of the program")

    model = layers(4, 3, 2)
    model[0].bias.register_post_accumulate_grad_hook(hook)
    wrapper, optimizer = optimized(SOLO, model, **options)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="hook of the program"):
        backward(wrapper, 7)
    fails[0] = False
    train(wrapper, optimizer)
    wrapper.wait_for_params()
    assert_equal(model.parameters(), plain(layers(4, 3, 2)))


@pytest.mark.parametrize("options", WAYS)
def test_a_gradient_that_is_not_in_the_buffer_is_refused_by_name(options):
    model = layers(4, 3, 2)
    wrapper, optimizer = optimized(SOLO, model, **options)
    optimizer.zero_grad()
    backward(wrapper, 0)
    model[1].weight.grad = torch.ones(2, 3)
    with pytest.raises(GradientError, match=r"^rank 0: gradients must be in main_grad, but 1\.weight has one in grad"):
        optimizer.step()
    train(wrapper, optimizer)
    wrapper.wait_for_params()
    assert_equal(model.parameters(), plain(layers(4, 3, 2)))


@pytest.mark.parametrize("options", WAYS)
def test_gradients_of_an_update_that_fails_are_not_left_behind(options):
    model = layers(4, 3, 2)
    wrapper, optimizer = optimized(SOLO, model, **options)
    handle = optimizer.optimizer.register_step_pre_hook(lambda *unused: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(wrapper, optimizer, 1)
    assert all(param.grad is None for param in model.parameters())
    handle.remove()
    train(wrapper, optimizer)
    wrapper.wait_for_params()
    assert_equal(model.parameters(), plain(layers(4, 3, 2)))


def replace_parameter(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def replace_module(model):
    model[0] = nn.Linear(4, 3)


def assign_state(model):
    model.load_state_dict(layers(4, 3, 2, seed=1).state_dict(), assign=True)


def add_parameter(model):
    model[0].scale = nn.Parameter(torch.ones(1))


def parametrize(model):
    nn.utils.parametrizations.weight_norm(model[0])


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("change", [replace_parameter, replace_module, assign_state, add_parameter, parametrize])
def test_a_parameter_that_was_not_there_when_the_model_was_wrapped_is_refused_by_name(change, options):
    model = layers(4, 3, 2)
    wrapper, optimizer = optimized(SOLO, model, **options)
    train(wrapper, optimizer, 1)
    change(model)
    optimizer.zero_grad()
    with pytest.raises(GradientError, match=r"^rank 0: 0\..* must stay frozen, or the parameter that it was"):
        optimizer.step()


@pytest.mark.parametrize("options", [SHARDED_ONLY, GATHER])
@pytest.mark.parametrize("turn", [torch.t, lambda data: data[:1], lambda data: data.view(-1)])
def test_data_that_is_turned_or_cut_in_its_place_is_refused(turn, options):
    model = layers(4, 4, 2)
    wrapper, optimizer = optimized(SOLO, model, **options)
    train(wrapper, optimizer, 1)
    wrapper.wait_for_params()
    optimizer.zero_grad()
    backward(wrapper, 1)
    model[0].weight.data = turn(model[0].weight.data)
    with pytest.raises(GradientError, match=r"the data of 0\.weight must stay where it was"):
        optimizer.step()


@pytest.mark.parametrize("options", WAYS)
def test_an_optimizer_is_not_built_over_a_changed_model(options):
    model = layers(4, 3, 2)
    wrapper = wrap(SOLO, model, **options)
    parametrize(model)
    with pytest.raises(GradientError, match=r"^rank 0: 0\.parametrizations.* wrap the model again"):
        DataParallelOptimizer(adamw(model), wrapper)


def frozen_model(shape, dtype=torch.float32):
    model = layers(4, 3, 2)
    model.register_parameter("table", nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=False))
    return model


@pytest.mark.parametrize(("shape", "dtype"), [((8,), torch.float32), ((4,), torch.float64), ((2, 2), torch.float32)])
def test_ranks_with_other_frozen_parameters_are_refused(shape, dtype):
    def work(group):
        model = frozen_model((4,)) if group.rank == 0 else frozen_model(shape, dtype)
        words = rf"rank 1 has frozen parameter 'table' of shape {list(shape)}, {dtype}".replace("[", r"\[")
        with pytest.raises(CollectiveError, match=words):
            wrap(group, model)

    run_ranks(2, work)


def test_ranks_with_parameters_of_other_shapes_are_refused():
    def work(group):
        model = nn.Sequential(nn.Linear(4, 6, bias=False) if group.rank == 0 else nn.Linear(6, 4, bias=False))
        with pytest.raises(CollectiveError, match=r"rank 1 has parameter '0\.weight' of shape \[4, 6\]"):
            wrap(group, model)

    run_ranks(2, work)


def test_one_rank_may_run_the_model_before_the_first_step_and_between_gradients_and_step():
    def work(group):
        model = layers(4, 3, 2)
        wrapper, optimizer = optimized(group, model, **GATHER)
        for step in range(4):
            if group.rank == 0:
                with torch.no_grad():
                    wrapper(inputs(0))
            group.barrier()
            optimizer.zero_grad()
            backward(wrapper, group.rank + step)
            wrapper.finish_grad_sync()
            if group.rank == 1:
                with torch.no_grad():
                    wrapper(inputs(1))
            group.barrier()
            optimizer.step()
        wrapper.wait_for_params()
        return [param.detach().clone() for param in model.parameters()]

    one, other = run_ranks(2, work)
    assert_equal(one, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("options", WAYS)
def test_copies_of_the_model_have_nothing_to_do_with_the_wrapper(copied, options):
    def work(group):
        model = layers(4, 3, 2)
        wrapper, optimizer = optimized(group, model, **options)
        train(wrapper, optimizer, 1)
        twin = copied(model)
        before = [param.detach().clone() for param in twin.parameters()]
        if group.rank == 0:  # alone
            with torch.no_grad():
                twin(inputs(0))
            twin.load_state_dict(twin.state_dict())
        group.barrier()
        train(wrapper, optimizer, 3)
        wrapper.wait_for_params()
        assert_equal(twin.parameters(), before)
        found = plain(twin, 1)
        again = layers(4, 3, 2)
        with torch.no_grad():
            for param, own in zip(again.parameters(), before, strict=True):
                param.copy_(own)
        assert_equal(found, plain(again, 1))

    run_ranks(2, work)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda wrapper: torch.save(wrapper, io.BytesIO())]
)
def test_a_wrapper_is_not_copied(copied):
    with pytest.raises(ArgumentError, match=r"^DistributedDataParallel must not be copied or pickled.* its module"):
        copied(wrap(SOLO, layers(4, 3, 2)))


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_whose_wrapper_is_gone_is_a_plain_one(steps, options):
    model, twin = layers(4, 3, 2), layers(4, 3, 2)
    wrapper, optimizer = optimized(SOLO, model, **options)
    train(wrapper, optimizer, steps)
    wrapper.wait_for_params()
    twin.load_state_dict(model.state_dict())
    reference = weakref.ref(wrapper)
    del wrapper, optimizer
    gc.collect()
    assert reference() is None
    assert all(type(module._parameters) is dict for module in model.modules())
    assert_equal(plain(model), plain(twin))


def test_parameters_whose_gather_runs_while_the_wrapper_goes_are_waited_for():
    def work(group):
        model = layers(4, 3, 2)
        wrapper, optimizer = optimized(group, model, **GATHER)
        for step in range(2):
            optimizer.zero_grad()
            backward(wrapper, step)
            optimizer.step()
        del wrapper, optimizer
        gc.collect()
        return [param.detach().clone() for param in model.parameters()]

    for params in run_ranks(2, work):
        assert_equal(params, plain(layers(4, 3, 2), 2))


@pytest.mark.parametrize("module", [None, "model", 3])
def test_what_is_no_module_is_refused(module):
    with pytest.raises(ArgumentError, match=r"^module must be a torch\.nn\.Module that is not wrapped"):
        wrap(SOLO, module)


def test_torchs_wrapper_is_not_wrapped():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        theirs = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        with pytest.raises(ArgumentError, match=r"must not be wrapped already, but is in torch's DistributedDataPar"):
            wrap(SOLO, theirs)
    finally:
        torch.distributed.destroy_process_group()


def test_a_wrapper_is_not_wrapped():
    with pytest.raises(ArgumentError, match=r"^module must be .* but is of DistributedDataParallel"):
        wrap(SOLO, wrap(SOLO, layers(4, 3, 2)))


def test_parameters_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        model = nn.Linear(4, 3)
    with pytest.raises(ArgumentError, match=r"^weight must be .* but was made in torch\.inference_mode"):
        wrap(SOLO, model)


@pytest.mark.parametrize("group", ["all", 2.5])
def test_what_is_no_process_group_is_refused(group):
    with pytest.raises(ArgumentError, match=r"^process_group must be one of torch or a Group"):
        wrap(group, layers(4, 3, 2))


KEPT = {
    "a list": lambda params: params,
    "a tuple": tuple,
    "a dictionary": lambda params: dict(enumerate(params)),
    "a list of lists": lambda params: [[param] for param in params],
    "a dictionary of lists": lambda params: {"all": params},
    "an object": lambda params: SimpleNamespace(params=params),
}


def flat(kept):
    if isinstance(kept, SimpleNamespace):
        return flat(kept.params)
    if isinstance(kept, dict):
        return flat(list(kept.values()))
    return [param for one in kept for param in (flat(one) if isinstance(one, list) else [one])]


class Keeping(nn.Module):
    """A model that reads its weights from a container or object of its own."""

    def __init__(self, keep):
        super().__init__()
        self.inner = layers(4, 30, 2)
        self._kept = keep(list(self.inner.parameters()))

    def forward(self, x):
        first, bias, second, last = flat(self._kept)
        return (x @ first.T + bias) @ second.T + last


@pytest.mark.parametrize("kind", KEPT)
def test_a_model_waits_for_parameters_that_it_has_in_a_container_of_its_own(kind):
    def work(group):
        model = Keeping(KEPT[kind])
        wrapper, optimizer = optimized(group, model, **GATHER)
        handle = optimizer.optimizer.register_step_pre_hook(lambda *unused: time.sleep(0.2 * group.rank))
        for number in range(2):
            optimizer.zero_grad()
            backward(wrapper, number)
            optimizer.step()
            with torch.no_grad():
                at_once = wrapper(inputs(0))
                wrapper.wait_for_params()
                assert torch.equal(at_once, wrapper(inputs(0)))
        handle.remove()

    run_ranks(2, work)


def test_parameters_stay_current_until_the_optimizer_steps():
    wrapper, optimizer = optimized(SOLO, layers(4, 3, 2), **GATHER)
    optimizer.zero_grad()
    backward(wrapper, 0)
    for group in wrapper.bucket_groups:
        group.start_grad_sync()
        group.wait_for_grads()
        assert group.param_gather_dispatched  # a forward pass on another thread begins no gather


def test_parameters_whose_data_lie_elsewhere_are_refused_by_name():
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(TwoTensor(torch.ones(3, 4), torch.ones(3, 4)))
    with pytest.raises(ArgumentError, match=r"^weight must be a plain tensor, but is of TwoTensor"):
        wrap(SOLO, model, use_distributed_optimizer=True)


def test_a_wrapper_whose_model_was_wrapped_again_does_not_run():
    model = layers(4, 3, 2)
    old = wrap(SOLO, model)
    wrap(SOLO, model)
    with pytest.raises(GradientError, match="its model was wrapped again"):
        old(inputs(0))


def add_after_backward(model, wrapper, step):
    backward(wrapper, step)
    model[2].bias.main_grad.add_(1)


def freeze_and_add_after_backward(model, wrapper, step):
    """The group of the frozen parameter is never ready, so it is reduced in `finish_grad_sync`."""
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    add_after_backward(model, wrapper, step)


def add_in_a_hook(model, wrapper, step):
    def hook(param):
        param.main_grad.add_(1)

    handles = [param.register_post_accumulate_grad_hook(hook) for param in model.parameters()]
    backward(wrapper, step)
    for handle in handles:
        handle.remove()


def change_the_bucket(model, wrapper, step):
    backward(wrapper, step)
    wrapper.bucket_groups[0].buckets[0].grad_data.mul_(2)


@pytest.mark.parametrize("options", [OVERLAP, GATHER])
@pytest.mark.parametrize(
    "change", [add_after_backward, freeze_and_add_after_backward, add_in_a_hook, change_the_bucket]
)
@pytest.mark.parametrize("who", [0, 1])
def test_gradients_that_are_changed_while_they_are_reduced_are_refused(change, options, who):
    def work(group):
        model = layers(4, 3, 2, 2)
        wrapper, optimizer = optimized(group, model, **options)
        with wrapper.guarded():
            for step in range(3):
                optimizer.zero_grad()
                with wrapper.no_sync():
                    backward(wrapper, step)
                next(model.parameters()).main_grad.add_(1)  # before the last backward pass
                if step == 2 and group.rank == who:
                    change(model, wrapper, step)
                else:
                    backward(wrapper, group.rank + step)
                optimizer.step()

    with pytest.raises(CollectiveError, match=rf"rank {who}: gradients must stay as they are from the moment"):
        run_ranks(2, work)


@pytest.mark.parametrize("options", [{}, OVERLAP])
def test_gradients_that_are_scaled_after_the_backward_pass_are_scaled_on_all_ranks(options):
    def work(group):
        model = layers(4, 3, 2)
        wrapper = wrap(group, model, **options)
        found = []
        for factor in (1.0, 1.0, 0.5):
            wrapper.zero_grad_buffer()
            backward(wrapper, group.rank)
            wrapper.scale_gradients(factor)
            wrapper.finish_grad_sync()
            found.append([param.main_grad.clone() for param in model.parameters()])
        return found

    for _, before, after in run_ranks(2, work):
        for own, scaled in zip(before, after, strict=True):
            torch.testing.assert_close(own * 0.5, scaled)


def test_a_broadcast_that_fails_on_one_rank_fails_on_all():
    def work(group):
        model = layers(4, 3, 2)
        model.frozen = nn.Parameter(torch.zeros(1).expand(3) if group.rank else torch.arange(3.0), requires_grad=False)
        wrapper = wrap(group, model)
        began = time.monotonic()
        with pytest.raises(CollectiveError, match=r"broadcast_params: rank 1: .*single memory location"):
            wrapper.broadcast_params()
        assert time.monotonic() - began < 3

    run_ranks(2, work)
