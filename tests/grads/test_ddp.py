"""The wrapper: gradients on several ranks, and what may be done in which order."""

import contextlib
import copy
import io
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.models.wrapped import backward, check, gradients, inputs, layers, wrap
from trackbed.comm import run_ranks
from trackbed.comm.store import MemoryStore
from trackbed.comm.store_group import StoreGroup
from trackbed.errors import ArgumentError, CollectiveError, GradientError
from trackbed.grads import Timeline
from trackbed.megatron import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

WAYS = [
    {"use_distributed_optimizer": sharded, "overlap_grad_reduce": overlap, "bucket_size": bucket_size}
    for sharded, overlap, bucket_size in itertools.product((False, True), (False, True), (None, 10))
]
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 10}
SHARDED = {**OVERLAP, "use_distributed_optimizer": True, "overlap_param_gather": True}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_averaged_over_ranks_and_added_over_micro_batches(options, size):
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **options)
        for step in range(3):
            numbers = range(step * 10, step * 10 + 2 * size)
            wrapper.zero_grad_buffer()
            with wrapper.no_sync():
                backward(wrapper, numbers[group.rank])
            backward(wrapper, numbers[size + group.rank])
            wrapper.finish_grad_sync()
            check(wrapper, gradients(layers(4, 3, 2), size, numbers))
            assert all(param.grad is None for param in wrapper.module.parameters())

    run_ranks(size, work)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_collective_may_average(average, sharded):
    def work(group):
        options = {"average_in_collective": average, "use_distributed_optimizer": sharded}
        wrapper = wrap(group, layers(4, 3, 2), **options)
        wrapper.zero_grad_buffer()
        backward(wrapper, group.rank)
        wrapper.finish_grad_sync()
        check(wrapper, gradients(layers(4, 3, 2), 3, range(3)))

    run_ranks(3, work)


def test_the_first_step_needs_no_counts_and_later_ones_issue_all_but_the_last_bucket_before_backward_ends():
    def work(group):
        timeline = Timeline()
        wrapper = wrap(group, layers(4, 3, 3, 2), observer=timeline, **OVERLAP)
        counts = []

        wrapper.module[0].weight.register_hook(lambda gradient: counts.append(len(timeline.events)))
        for step in range(3):
            wrapper.zero_grad_buffer()
            backward(wrapper, group.rank + step)
            counts.append(len(timeline.events))
            wrapper.finish_grad_sync()
        num = len(wrapper.bucket_groups)
        assert num == 3
        # Before the last gradient, and after backward.
        assert counts == [0, 0, num + num - 1, 2 * num, 2 * num + num - 1, 3 * num]
        return [(event.step, event.bucket) for event in timeline.events]

    first, second = run_ranks(2, work)
    assert first == second == [(step, bucket) for step in range(3) for bucket in range(3)]


def test_buckets_are_issued_in_one_order_although_gradients_arrive_in_another():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = layers(4, 4, seed=1), layers(4, 4, seed=2)
            self.order = 0

        def forward(self, x):
            return self.b(self.a(x)) if self.order else self.a(self.b(x))

    def work(group):
        timeline = Timeline()
        wrapper = wrap(group, Branches(), observer=timeline, **{**OVERLAP, "bucket_size": 1})
        for step in range(4):
            wrapper.module.order = (group.rank + step) % 2
            wrapper.zero_grad_buffer()
            backward(wrapper, group.rank)
            wrapper.finish_grad_sync()
        return [(event.step, event.bucket) for event in timeline.events]

    orders = run_ranks(3, work)
    assert all(order == sorted(order) for order in orders)


def test_no_sync_may_be_nested():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **OVERLAP)
        for _ in range(2):
            wrapper.zero_grad_buffer()
            with wrapper.no_sync():
                with wrapper.no_sync():
                    backward(wrapper, group.rank)
                backward(wrapper, 2 + group.rank)
                assert not any(group.is_last_microbatch for group in wrapper.bucket_groups)
            with contextlib.suppress(ZeroDivisionError), wrapper.no_sync():
                raise ZeroDivisionError
            backward(wrapper, 4 + group.rank)
            wrapper.finish_grad_sync()
            check(wrapper, gradients(layers(4, 3, 2), 2, range(6)))

    run_ranks(2, work)


@pytest.mark.parametrize("options", [{}, OVERLAP])
def test_gradients_may_be_set_to_zero_between_any_two_backward_passes(options):
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), **options)
        wrapper.zero_grad_buffer()
        wrapper.zero_grad_buffer()
        for _ in range(3):
            with wrapper.no_sync():
                backward(wrapper, 50)
                wrapper.zero_grad_buffer()
                backward(wrapper, 51)
            wrapper.zero_grad_buffer()
            with wrapper.no_sync():
                wrapper.zero_grad_buffer()
                backward(wrapper, group.rank)
            backward(wrapper, 2 + group.rank)
            wrapper.finish_grad_sync()
            check(wrapper, gradients(layers(4, 3, 2), 2, range(4)))
            wrapper.zero_grad_buffer()
            backward(wrapper, 52)  # a whole step that is dropped after its buckets were issued
            wrapper.zero_grad_buffer()

    run_ranks(2, work)


def test_without_overlap_no_backward_is_needed():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2))
        wrapper.finish_grad_sync()
        assert not wrapper.buffers[0].grad_data.any()
        wrapper.zero_grad_buffer()
        wrapper.module[0].weight.main_grad.fill_(group.rank)
        wrapper.start_grad_sync()
        wrapper.finish_grad_sync()
        assert (wrapper.module[0].weight.main_grad == 0.5).all()

    run_ranks(2, work)


@pytest.mark.parametrize("options", [{}, OVERLAP, SHARDED])
def test_the_callers_options_are_never_changed(options):
    config = DistributedDataParallelConfig(**{**options, "bucket_size": 7})
    before = replace(config)
    wrapper = DistributedDataParallel(None, config, layers(4, 2))
    assert config == before
    assert wrapper.ddp_config is not config


class Unused(nn.Module):
    """A model of which one layer takes part only if asked."""

    def __init__(self):
        super().__init__()
        self.used, self.other = layers(4, 3, seed=1), layers(4, 3, seed=2)
        self.uses_other = False

    def forward(self, x):
        return self.used(x) + (self.other(x) if self.uses_other else 0)


def test_a_missing_gradient_is_an_error_with_overlap():
    def work(group):
        wrapper = wrap(group, Unused(), **OVERLAP)
        backward(wrapper, group.rank)
        with pytest.raises(GradientError) as caught:
            wrapper.finish_grad_sync()
        return str(caught.value)

    for rank, message in enumerate(run_ranks(2, work)):
        for words in (f"rank {rank}:", "other.0.", "bucket 0", "and 1 other have none", "allow_unused=True"):
            assert words in message


@pytest.mark.parametrize("options", [{**OVERLAP, "allow_unused": True}, {}, {"allow_unused": True, **SHARDED}])
def test_missing_gradients_are_zeros_if_that_is_allowed_or_nothing_overlaps(options):
    def work(group):
        wrapper = wrap(group, Unused(), **options)
        plain = Unused()
        # The layer is used on some ranks and in some steps only.
        for users in ((), (0, 1), (1,), (), (0, 1), (0,)):
            wrapper.zero_grad_buffer()
            wrapper.module.uses_other = group.rank in users
            backward(wrapper, group.rank)
            wrapper.finish_grad_sync()
            wanted = {}
            for rank in range(2):
                plain.uses_other = rank in users
                for name, gradient in gradients(plain, 2, [rank]).items():
                    wanted[name] = wanted.get(name, 0) + gradient
            check(wrapper, wanted)

    run_ranks(2, work)


class Twice(nn.Module):
    """A layer that is used twice, and one that is used once, perhaps under activation checkpointing."""

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.layer, self.end = layers(4, 4, seed=1), layers(4, 2, seed=2)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = x.detach().requires_grad_()
        for _ in range(2):
            if self.use_reentrant is None:
                x = self.layer(x).tanh()
            else:
                x = checkpoint(lambda y: self.layer(y).tanh(), x, use_reentrant=self.use_reentrant)
        return self.end(x)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("options", [OVERLAP, SHARDED, {}])
def test_a_parameter_may_be_used_twice_with_any_activation_checkpointing(use_reentrant, options):
    def work(group):
        wrapper = wrap(group, Twice(use_reentrant), **options)
        for step in range(3):
            wrapper.zero_grad_buffer()
            with wrapper.no_sync():
                backward(wrapper, 2 * step + group.rank)
            backward(wrapper, 50 + 2 * step + group.rank)
            wrapper.finish_grad_sync()
            numbers = [2 * step, 2 * step + 1, 50 + 2 * step, 51 + 2 * step]
            check(wrapper, gradients(Twice(), 2, numbers))

    run_ranks(2, work)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_module_may_be_compiled_before_it_is_wrapped(backend):
    model = torch.compile(layers(4, 3, 2), backend=backend)
    wrapper = wrap(None, model, **SHARDED)
    for step in range(3):
        wrapper.zero_grad_buffer()
        backward(wrapper, step)
        wrapper.finish_grad_sync()
        found = gradients(layers(4, 3, 2), 1, [step])
        check(wrapper, {f"_orig_mod.{name}": gradient for name, gradient in found.items()})
        wrapper.start_param_sync()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_layer_may_be_compiled_before_the_model_is_wrapped():
    model = layers(4, 3, 2)
    model[1].compile(backend="eager")
    wrapper = wrap(None, model, **SHARDED)
    for step in range(3):
        wrapper.zero_grad_buffer()
        backward(wrapper, step)
        wrapper.finish_grad_sync()
        check(wrapper, gradients(layers(4, 3, 2), 1, [step]))
        wrapper.start_param_sync()


def test_frozen_parameters_have_no_place():
    model = layers(4, 3, 2)
    model[0].requires_grad_(False)
    wrapper = wrap(None, model, **SHARDED)
    assert wrapper.params_with_grad == list(model[1].parameters())
    assert not hasattr(model[0].weight, "main_grad")
    backward(wrapper, 1)
    wrapper.finish_grad_sync()
    plain = layers(4, 3, 2)
    plain[0].requires_grad_(False)
    check(wrapper, gradients(plain, 1, [1]))


@pytest.mark.parametrize("options", WAYS)
def test_a_module_without_parameters_can_be_wrapped(options):
    def work(group):
        wrapper = wrap(group, nn.ReLU(), **options)
        assert wrapper(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
        wrapper.zero_grad_buffer()
        wrapper.finish_grad_sync()
        wrapper.broadcast_params()
        wrapper.start_param_sync(force_sync=True)
        wrapper.offload_grad_buffers()
        wrapper.restore_grad_buffers()
        assert wrapper.state_dict() == {}
        assert (wrapper.buffers, wrapper.bucket_groups) == ([], [])

    run_ranks(2, work)


@pytest.mark.parametrize("options", WAYS)
def test_parameters_without_elements_are_no_trouble(options):
    def work(group):
        model = layers(4, 2)
        model[0].nothing = nn.Parameter(torch.zeros(0, 3))
        model[0].alone = nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))
        wrapper = wrap(group, model, allow_unused=True, **options)
        for _ in range(2):
            wrapper.zero_grad_buffer()
            backward(wrapper, group.rank)
            wrapper.finish_grad_sync()
        plain = layers(4, 2)
        wanted = gradients(plain, 2, range(2))
        check(wrapper, {"0.nothing": torch.zeros(0, 3), "0.alone": torch.zeros(0, dtype=torch.bfloat16), **wanted})

    run_ranks(2, work)


class Fused(torch.autograd.Function):
    """A product whose backward adds the gradient of the weight to main_grad itself, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad.add_(x.t() @ gradient)
        ctx.weight.grad_added_to_main_grad = True
        return None, torch.full_like(ctx.weight, 100.0)


@pytest.mark.parametrize("zero_out_wgrad", [False, True])
@pytest.mark.parametrize("options", [{}, OVERLAP])
def test_gradients_that_a_kernel_has_added_are_not_added_again(options, zero_out_wgrad):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4, 2))
    model.weight.zero_out_wgrad = zero_out_wgrad
    model.forward = lambda x: Fused.apply(x, model.weight)
    wrapper = wrap(None, model, **options)
    for _ in range(2):
        wrapper.zero_grad_buffer()
        assert model.weight.grad_added_to_main_grad is False
        wrapper(inputs(1)).sum().backward()
        wrapper.finish_grad_sync()
        wanted = inputs(1).sum(0)[:, None].expand(4, 2) + (100.0 if zero_out_wgrad else 0.0)
        torch.testing.assert_close(model.weight.main_grad, wanted)
        assert model.weight.grad is None


def test_modules_may_compute_gradients_of_weights_later():
    class Later(nn.Linear):
        def __init__(self):
            super().__init__(4, 2, bias=False)
            self.weight.skip_backward_post_hook = True
            self.hooks = []

        def register_wgrad_accumulation_and_reduce_hooks(self, hook):
            self.hooks.append(hook)

        def compute(self, gradient):
            self.weight.grad = gradient
            for hook in self.hooks:
                hook()

    model = nn.Sequential(Later(), nn.Linear(2, 2))
    wrapper = wrap(None, model, delay_wgrad_compute=True, **OVERLAP)
    for _ in range(2):
        wrapper.zero_grad_buffer()
        backward(wrapper, 1)
        assert len(model[0].hooks) == 1
        model[0].weight.grad = None
        model[0].compute(torch.full((2, 4), 3.0))
        wrapper.finish_grad_sync()
        assert (model[0].weight.main_grad == 3).all()


def test_experts_are_reduced_over_their_own_ranks_but_divided_by_all():
    stores = [MemoryStore(), MemoryStore()]

    def work(group):
        experts = StoreGroup(lambda: stores[group.rank % 2], rank=group.rank // 2, size=2, timeout_seconds=30)
        model = layers(4, 3, 2)
        for param in model[1].parameters():
            param.allreduce = False
        wrapper = wrap(group, model, expert_process_group=experts, **SHARDED)
        assert [len(wrapper.buffers), len(wrapper.expert_parallel_buffers)] == [1, 1]
        for _ in range(2):
            wrapper.zero_grad_buffer()
            backward(wrapper, group.rank)
            wrapper.finish_grad_sync()
            dense = gradients(layers(4, 3, 2), 4, range(4))
            expert = gradients(layers(4, 3, 2), 4, [group.rank % 2, group.rank % 2 + 2])
            check(wrapper, {name: (expert if name.startswith("1.") else dense)[name] for name in dense})
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(group.rank)
        wrapper.broadcast_params()
        assert [param.flatten()[0].item() for param in model.parameters()] == [0, 0, group.rank % 2, group.rank % 2]

    run_ranks(4, work)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("options", [{}, OVERLAP])
def test_gradients_may_have_a_graph(options):
    wrapper = wrap(None, layers(4, 3, 2), **options)
    for _ in range(2):
        wrapper.zero_grad_buffer()
        backward(wrapper, 1, create_graph=True)
        wrapper.finish_grad_sync()
        assert not any(param.main_grad.requires_grad for param in wrapper.module.parameters())
        check(wrapper, gradients(layers(4, 3, 2), 1, [1]))


@pytest.mark.parametrize("options", [{}, OVERLAP])
def test_embeddings_may_have_sparse_gradients(options):
    def work(group):
        model = nn.Embedding(5, 2, sparse=True)
        wrapper = wrap(group, model, **options)
        for _ in range(2):
            wrapper.zero_grad_buffer()
            wrapper(torch.tensor([group.rank, 3, 3])).sum().backward()
            wrapper.finish_grad_sync()
            assert model.weight.main_grad[:, 0].tolist() == [0.5, 0.5, 0, 2, 0]

    run_ranks(2, work)


def test_parameters_are_broadcast_from_the_first_rank():
    def work(group):
        model = layers(4, 3, 2, seed=group.rank)
        model.extra = nn.Parameter(torch.full((3, 2), float(group.rank)).t(), requires_grad=False)
        wrapper = wrap(group, model, **SHARDED)
        wrapper.broadcast_params()
        return {name: value.clone() for name, value in wrapper.state_dict().items()}

    for found in run_ranks(3, work):
        assert not found.pop("extra").any()
        assert all(torch.equal(value, found[name]) for name, value in layers(4, 3, 2).state_dict().items())


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_forced_all_reduce_gives_each_rank_all_gradients(size, sharded):
    def work(group):
        wrapper = wrap(group, layers(4, 2), use_distributed_optimizer=sharded)
        backward(wrapper, group.rank)
        wrapper.finish_grad_sync(force_all_reduce=True)
        return {name: param.main_grad.clone() for name, param in wrapper.module.named_parameters()}

    wanted = gradients(layers(4, 2), size, range(size))
    for found in run_ranks(size, work):
        torch.testing.assert_close(found, wanted)


def test_gradients_can_be_scaled_offloaded_and_restored():
    wrapper = wrap(None, layers(4, 2))
    backward(wrapper, 1)
    wrapper.finish_grad_sync()
    wrapper.scale_gradients(0.5)
    check(wrapper, {name: gradient / 2 for name, gradient in gradients(layers(4, 2), 1, [1]).items()})
    wrapper.offload_grad_buffers()
    wrapper.restore_grad_buffers()
    assert not wrapper.module[0].weight.main_grad.any()
    wrapper.zero_grad_buffer()
    backward(wrapper, 2)
    wrapper.finish_grad_sync()
    check(wrapper, gradients(layers(4, 2), 1, [2]))


@pytest.mark.parametrize(
    "tokens", [lambda rank: 3 + rank, lambda rank: torch.tensor(3 + rank), lambda rank: 0, lambda rank: 2**62]
)
def test_gradients_may_be_divided_by_the_tokens_of_all_ranks(tokens):
    def work(group):
        config = SimpleNamespace(calculate_per_token_loss=True)
        parts = [
            DistributedDataParallel(config, DistributedDataParallelConfig(), layers(4, 2), process_group=group)
            for _ in range(2)
        ]
        for part in parts:
            backward(part, group.rank)
        total = sum(int(tokens(rank)) for rank in range(2))
        assert finalize_model_grads(parts, tokens(group.rank)) == total
        for part in parts:
            check(part, gradients(layers(4, 2), max(total, 1), range(2)))

    run_ranks(2, work)


@pytest.mark.parametrize(
    "option", ["fp8_param_gather", "use_megatron_fsdp", "use_custom_fsdp", "nccl_ub", "overlap_param_gather"]
)
def test_options_that_are_not_supported_are_refused_by_the_wrapper(option):
    config = DistributedDataParallelConfig(**{option: True})
    with pytest.raises(ArgumentError, match=f"^{option} "):
        DistributedDataParallel(None, config, layers(4, 2))


@pytest.mark.parametrize("option", ["data_parallel_sharding_strategy", "outer_dp_sharding_strategy"])
def test_strategies_of_fsdp_are_refused(option):
    with pytest.raises(ArgumentError, match=f"{option} must be 'no_shard'"):
        DistributedDataParallel(None, DistributedDataParallelConfig(**{option: "optim"}), layers(4, 2))


@pytest.mark.parametrize("size", [True, 2.5, 0, -1])
def test_a_bucket_size_that_is_no_count_is_refused(size):
    with pytest.raises(ArgumentError, match=r"^bucket_size must be a whole number of elements, at least 1"):
        wrap(None, layers(4, 2), overlap_grad_reduce=True, bucket_size=size)


def test_parameters_that_cannot_lie_in_a_buffer_are_refused_by_name():
    for model, words in (
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64)), "1.weight must be of real numbers"),
        (nn.LazyLinear(3), "weight must have a shape, but is lazy"),
        (nn.Linear(2, 2, device="meta"), "weight must have data, but lies on the device meta"),
    ):
        with pytest.raises(ArgumentError, match=words):
            wrap(None, model)


def test_ranks_with_other_options_are_refused():
    def work(group):
        wrap(group, layers(4, 2), check_for_nan_in_grad=group.rank == 1)

    with pytest.raises(CollectiveError, match="rank 1 has option check_for_nan_in_grad = True, and rank 0"):
        run_ranks(2, work)


def test_one_process_needs_no_torch_distributed():
    assert not torch.distributed.is_initialized()
    wrapper = DistributedDataParallel(None, DistributedDataParallelConfig(), layers(4, 2))
    assert wrapper.config is None
    assert (wrapper.dp_cp_group.size(), wrapper.dp_cp_group.rank()) == (1, 0)


def test_the_state_of_the_model_can_be_copied_saved_and_loaded():
    wrapper = wrap(None, layers(4, 3, 2), **SHARDED)
    state = wrapper.state_dict()
    assert list(state) == list(layers(4, 3, 2).state_dict())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for copied in (copy.deepcopy(state), torch.load(file, weights_only=True)):
        other = wrap(None, layers(4, 3, 2, seed=9), **SHARDED)
        places = [param.data_ptr() for param in other.module.parameters()]
        other.load_state_dict(copied)
        assert places == [param.data_ptr() for param in other.module.parameters()]
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in state.items())
    with pytest.raises(ArgumentError, match="assign must be False"):
        wrapper.load_state_dict(state, assign=True)


def test_nan_is_refused_with_the_parameter_and_the_bucket():
    def work(group):
        wrapper = wrap(group, layers(4, 3, 2), check_for_nan_in_grad=True, **OVERLAP)
        wrapper.module[1].bias.register_hook(lambda gradient: gradient * float("nan"))
        backward(wrapper, group.rank)
        with pytest.raises(GradientError, match=rf"rank {group.rank}: .*that of 1.bias in bucket 0 is NaN"):
            wrapper.finish_grad_sync()

    run_ranks(2, work)
