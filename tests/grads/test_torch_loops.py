"""Training loops written for torch train the same on Trackbed's wrapper, or are refused with the remedy."""

import contextlib
import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.processes.launching import run_script
from trackbed import megatron
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CollectiveError, GradientError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.optim import DataParallelOptimizer

SIZE = 2
pytestmark = pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")


class Net(nn.Module):
    def __init__(self, ways):
        super().__init__()
        self.ways = ways
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        generator = torch.Generator().manual_seed(0)  # ranks are threads, which share the global one
        with torch.no_grad():
            for param in self.parameters():
                param.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.ways["reentrant"]) if "reentrant" in self.ways else layer(x)
            x = x.tanh()
        return Hidden(x) if "hidden" in self.ways else x


class Hidden:
    """A kind of output in which no tensor is found."""

    def __init__(self, value):
        self.value = value


def batch(rank, number=0):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + rank)).requires_grad_()


def reference(gradients_of, ways=None):
    """Mean over the ranks of the gradients of plain models. `gradients_of(model, rank)` makes them."""
    models = [Net(ways or {}) for _ in range(SIZE)]
    for rank, model in enumerate(models):
        gradients_of(model, rank)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return [(one.grad.detach() / 2) + other.grad.detach() / 2 for one, other in pairs]


def config(overlaps, **more):
    return DistributedDataParallelConfig(overlap_grad_reduce=overlaps, bucket_size=40, **more)


def on_both(function, overlaps, ways=None, **more):
    """Results of `function(wrapper, rank)` on two ranks."""

    def on(group):
        model = DistributedDataParallel(Net(ways or {}), config(overlaps, **more), process_group=group)
        return function(model, group.rank)

    return run_ranks(SIZE, on)


def check_gradients(backward, overlaps, *, passes=1, ways=None, tolerance=0):
    wanted = reference(backward, ways)

    def on(model, rank):
        for _ in range(passes):
            model.zero_grad()
            backward(model, rank)
        for param, value in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(param.grad, value, rtol=tolerance, atol=tolerance)
            assert param.grad.data_ptr() == param.main_grad.data_ptr() or param.grad.requires_grad

    on_both(on, overlaps, ways)


@pytest.fixture(params=[False, True], ids=["no overlap", "overlap"])
def overlaps(request):
    return request.param


def test_loops_end_with_the_bits_of_torchs_wrapper_on_two_processes():
    outcomes = run_script(Path(__file__).with_name("torch_loops_rank.py"), 2, "all", limit_seconds=200)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == {name: [] for name in outcomes[0][0]}
    assert len(outcomes[0][0]) >= 40


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_are_part_of_the_pass(reentrant, overlaps):
    def backward(model, rank):
        model(batch(rank)).square().sum().backward()

    check_gradients(backward, overlaps, passes=3, ways={"reentrant": reentrant})


def test_the_whole_model_may_be_in_an_activation_checkpoint(overlaps):
    def backward(model, rank):
        checkpoint(model, batch(rank), use_reentrant=True).square().sum().backward()

    check_gradients(backward, overlaps, passes=2)


def test_a_graph_that_is_walked_twice_is_reduced_twice():
    def backward(model, rank):
        loss = model(batch(rank)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    check_gradients(backward, False, passes=2, tolerance=1e-6)


def test_two_forward_passes_in_one_loss_are_one_pass():
    def backward(model, rank):
        (model(batch(rank)).sum() + model(batch(rank, 1)).square().sum()).backward()

    check_gradients(backward, False, passes=2)


@pytest.mark.parametrize("ways", [{}, {"hidden": True}])
def test_a_loss_in_which_the_wrapper_finds_no_output_is_reduced(ways, overlaps):
    def backward(model, rank):
        inner = getattr(model, "module", model)
        found = inner(batch(rank)) if not ways else model(batch(rank)).value
        found.square().sum().backward()

    check_gradients(backward, overlaps, passes=2, ways=ways)


def test_gradients_with_a_graph_have_the_mean_and_keep_it(overlaps):
    def backward(model, rank):
        model(batch(rank)).square().sum().backward(create_graph=True)

    check_gradients(backward, overlaps, passes=2)

    def penalised(model, rank):
        model(batch(rank)).square().sum().backward(create_graph=True)
        found = [param.grad for param in model.parameters()]
        return torch.autograd.grad(sum(one.square().sum() for one in found), batch(rank), allow_unused=True), found

    alone = DistributedDataParallel(Net({}), config(overlaps), process_group=SOLO)
    plain = Net({})
    second = []
    for model in (alone, plain):
        model(batch(0)).square().sum().backward(create_graph=True)
        penalty = sum(param.grad.square().sum() for param in model.parameters())
        second.append(torch.autograd.grad(penalty, list(model.parameters())))
    for ours, theirs in zip(*second, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_gradient_penalty_is_trained(overlaps):
    def backward(model, rank):
        x = batch(rank)
        found = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        found.square().sum().backward()

    check_gradients(backward, overlaps, passes=2)


def test_sparse_gradients_become_dense():
    plain = nn.Embedding(6, 3, sparse=True)
    model = DistributedDataParallel(copy.deepcopy(plain), process_group=SOLO)
    for _ in range(2):
        for one in (plain, model):
            one(torch.tensor([1, 4, 4])).square().sum().backward()
    assert torch.equal(model.module.weight.grad, plain.weight.grad.to_dense())


def test_a_failed_backward_pass_is_forgotten():
    def backward(model, rank):
        model(batch(rank)).square().sum().backward()

    wanted = reference(backward)

    def on(model, rank):
        for _ in range(2):
            bad = model(batch(rank))
            bad.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                bad.sum().backward()
            model.zero_grad()
            backward(model, rank)
        for param, value in zip(model.parameters(), wanted, strict=True):
            assert torch.equal(param.grad, value)

    on_both(on, False)


def test_what_was_added_in_no_sync_is_reduced_by_finish_grad_sync(overlaps):
    def backward(model, rank):
        no_sync = getattr(model, "no_sync", contextlib.nullcontext)
        for number in range(2):
            with no_sync():
                model(batch(rank, number)).square().sum().backward()
        getattr(model, "finish_grad_sync", lambda: None)()

    check_gradients(backward, overlaps, passes=2)


def test_an_optimizer_that_takes_over_after_a_pass_uses_its_gradients(overlaps):
    def on(model, rank):
        model(batch(rank)).square().sum().backward()
        optimizer = DataParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        for _ in range(2):
            optimizer.zero_grad()
            model(batch(rank)).square().sum().backward()
            optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    def plain(model, rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(batch(rank)).square().sum().backward()
            optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    for ours, theirs in zip(on_both(on, overlaps), on_both(plain, overlaps), strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_gradients_that_were_dropped_are_not_taken_over():
    model = DistributedDataParallel(Net({}), process_group=SOLO)
    model(batch(0)).sum().backward()
    model.zero_grad()
    optimizer = DataParallelOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert optimizer.step().norm == 0


def test_after_zero_grad_buffer_gradients_are_in_main_grad_alone(overlaps):
    def on(model, rank):
        model(batch(rank)).sum().backward()
        first = [param.grad.clone() for param in model.parameters()]
        model.zero_grad_buffer()
        model(batch(rank)).sum().backward()
        assert all(param.grad is None for param in model.parameters())
        model.finish_grad_sync()
        for param, value in zip(model.parameters(), first, strict=True):
            assert torch.equal(param.main_grad, value)

    on_both(on, overlaps)


UNSEEN = {
    "a sharded optimizer": lambda group: DistributedDataParallel(
        Net({}), config(False, use_distributed_optimizer=True), process_group=group
    ),
    "gradients in float32": lambda group: DistributedDataParallel(
        Net({}).bfloat16(), config(True, grad_reduce_in_fp32=True), process_group=group
    ),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_a_step_that_would_train_nothing_is_an_error_with_the_remedy(kind):
    def on(group):
        model = UNSEEN[kind](group)
        dtype = next(model.parameters()).dtype
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()  # no gradient has arrived
        model(batch(0).to(dtype)).sum().backward()
        with pytest.raises(GradientError, match=r"AdamW.step\(\): rank \d: .*layers.0.weight.*DataParallelOptimizer"):
            optimizer.step()
        model.finish_grad_sync()
        with pytest.raises(GradientError, match="DataParallelOptimizer"):
            torch.optim.SGD(model.module.layers[2].parameters(), lr=0.1).step()
        model.zero_grad_buffer()
        optimizer.step()  # they were dropped on purpose

    run_ranks(SIZE, on)


def test_after_zero_grad_buffer_a_step_of_torch_is_an_error():
    model = DistributedDataParallel(Net({}), process_group=SOLO)
    model.zero_grad_buffer()
    model(batch(0)).sum().backward()
    with pytest.raises(GradientError, match="never set to zero by zero_grad_buffer"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_of_the_optimizer_inside_is_an_error(is_sharded, dtype):
    def on(group):
        model = DistributedDataParallel(
            Net({}).to(dtype), config(False, use_distributed_optimizer=is_sharded), process_group=group
        )
        inner = torch.optim.AdamW(model.parameters())
        optimizer = DataParallelOptimizer(inner, model)
        for _ in range(2):
            optimizer.zero_grad()
            inner.step()
            model(batch(group.rank).to(dtype)).sum().backward()
            with pytest.raises(GradientError, match=r"call step\(\) of the DataParallelOptimizer instead"):
                inner.step()
            optimizer.step()

    run_ranks(SIZE, on)


def test_gradients_that_the_program_puts_into_grad_are_stepped():
    model = DistributedDataParallel(Net({}), config(False, use_distributed_optimizer=True), process_group=SOLO)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [param.detach().clone() for param in model.parameters()]
    model(batch(0)).sum().backward()
    model.finish_grad_sync()
    for param in model.parameters():
        param.grad = param.main_grad
    optimizer.step()
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value - param.main_grad)


def test_the_form_of_megatron_keeps_its_ways():
    megatrons = megatron.DistributedDataParallelConfig()
    model = megatron.DistributedDataParallel(None, megatrons, Net({}), process_group=SOLO)
    model(batch(0)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.finish_grad_sync()
    assert float(model.module.layers[0].weight.main_grad.abs().sum()) > 0


def test_a_wrapper_that_is_gone_or_replaced_stops_no_step():
    module = Net({})
    model = DistributedDataParallel(module, config(False, use_distributed_optimizer=True), process_group=SOLO)
    model(batch(0)).sum().backward()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    again = DistributedDataParallel(module, process_group=SOLO)
    optimizer.step()
    again(batch(0)).sum().backward()
    optimizer.step()
    del model, again
    module.zero_grad()
    optimizer.step()


def test_a_missing_gradient_is_an_error_that_names_it_where_buckets_overlap():
    def on(group):
        model = DistributedDataParallel(Net({}), config(True), process_group=group)
        with model.guarded():
            first = model.module.layers[0](batch(group.rank)).sum()
            if group.rank == 0:
                first.backward()
            else:
                model(batch(1)).sum().backward()

    with pytest.raises(CollectiveError, match=r"rank 0: GradientError: .*layers.1.weight.*allow_unused=True"):
        run_ranks(SIZE, on)


@pytest.mark.parametrize("way", ["replaced", "assigned", "unfrozen"])
def test_a_parameter_that_was_not_wrapped_is_an_error_that_names_it(way):
    module = Net({})
    module.layers[3].weight.requires_grad_(way != "unfrozen")
    model = DistributedDataParallel(module, process_group=SOLO)
    if way == "replaced":
        module.layers[3].weight = nn.Parameter(torch.ones(5, 5))
    elif way == "assigned":
        module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    else:
        module.layers[3].weight.requires_grad_()
    with pytest.raises(GradientError, match=r"layers.\d.weight must stay frozen, or the parameter that it was"):
        model(batch(0)).sum().backward()


def test_parameters_whose_data_are_swapped_are_trained():
    module = Net({})
    model = DistributedDataParallel(module, process_group=SOLO)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        for param in module.parameters():
            param.data = param.data.clone()
        before = module.layers[0].weight.detach().clone()
        optimizer.zero_grad()
        model(batch(0)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(module.layers[0].weight.detach(), before - 0.1 * module.layers[0].weight.grad)


def test_a_compiled_module_trains_as_it_is():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = Net({})
        model = DistributedDataParallel(torch.compile(Net({}), backend="eager"), process_group=SOLO)
        for one in (plain, model):
            optimizer = torch.optim.AdamW(one.parameters(), 0.01)
            for _ in range(2):
                optimizer.zero_grad()
                one(batch(0)).square().sum().backward()
                optimizer.step()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def parameters_after_a_failed_pass(overlaps, fails):
    def body(group):
        model = DistributedDataParallel(Net({}), config(overlaps), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        first, second = model(batch(group.rank)), model(batch(group.rank, 1))
        handle = fails(model, first)
        with pytest.raises(ZeroDivisionError):
            first.sum().backward()
        handle.remove()
        optimizer.zero_grad()
        second.square().sum().backward()
        optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    return run_ranks(SIZE, body)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_backward_pass_after_one_that_failed_is_reduced_without_a_forward_pass_between(overlaps):
    def divide(_):
        return 1 / 0

    one, other = parameters_after_a_failed_pass(
        overlaps, lambda model, _: model.module.layers[1].weight.register_hook(divide)
    )
    assert all(map(torch.equal, one, other))


def test_a_parameter_that_the_model_returns_keeps_no_hooks():
    class Returning(Net):
        def forward(self, x):
            return super().forward(x), self.layers[0].bias

    model = DistributedDataParallel(Returning({}), process_group=SOLO)
    for number in range(5):
        value, bias = model(batch(0, number))
        (value.sum() * bias.sum()).backward()
    assert not model.module.layers[0].bias._backward_hooks


class Fused(torch.autograd.Function):
    """Adds the gradient of the weight to `main_grad`, as kernels of Megatron and Transformer Engine do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight.main_grad.add_(gradient.t() @ ctx.saved_tensors[0])
        ctx.weight.grad_added_to_main_grad = True
        return None, torch.zeros_like(ctx.weight) if ctx.weight.returns else None


@pytest.mark.parametrize("returns", [False, True])
def test_a_gradient_that_a_kernel_added_to_main_grad_is_not_lost(returns):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 4))
            self.bias = nn.Parameter(torch.ones(1))
            self.weight.returns = returns

        def forward(self, x):
            return Fused.apply(x, self.weight) + self.bias

    model = DistributedDataParallel(Module(), process_group=SOLO)
    with pytest.raises(GradientError, match=r"grad_added_to_main_grad.*zero_grad_buffer"):
        model(torch.ones(2, 4)).sum().backward()
    model.zero_grad_buffer()
    model(torch.ones(2, 4)).sum().backward()
    model.finish_grad_sync()
    assert model.module.weight.main_grad.tolist() == [[2.0] * 4]
