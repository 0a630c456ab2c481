"""A step reads one vector from a GPU, once. The GPU is pretended."""

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from trackbed.comm import SOLO
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig, gradient_check
from trackbed.grads.collectives import torch as torch_collectives
from trackbed.grads.engine import GradientEngine
from trackbed.grads.failure_aware_wait import Waiter
from trackbed.grads.gradient_check import NonFiniteGradientError
from trackbed.optim import DataParallelOptimizer, update_agreement

SCALAR_READ = torch.ops.aten._local_scalar_dense.default
VIEWS = ("as_strided", "detach", "view", "split", "slice", "select", "alias")


class Operators(TorchDispatchMode):
    """Names of the operators in a block, and copies from a GPU."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.scalar_reads = 0
        self.copies_to_host = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.scalar_reads += function is SCALAR_READ
        if isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.copies_to_host += any(isinstance(one, torch.Tensor) and one.is_cuda for one in args)
        if function.__name__.split(".")[0] not in VIEWS:
            self.names.append(function.__name__)
        return result


class Experts(torch.nn.Module):
    """A dense layer, and one of an expert."""

    def __init__(self, dtype=torch.float32, num_layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4, dtype=dtype) for _ in range(num_layers)])
        self.expert = torch.nn.Linear(4, 4, dtype=dtype)
        for param in self.expert.parameters():
            param.allreduce = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.expert(x)


@pytest.fixture(autouse=True)
def no_judge(monkeypatch):
    """Megatron Core's state machine, which tests before may have chosen, reads each norm."""
    monkeypatch.setattr(gradient_check, "_judge", [None])


@pytest.fixture
def pretends(monkeypatch):
    """Tensors on the CPU count as if they were on a GPU."""

    def is_number(value):
        return isinstance(value, torch.Tensor) and value.numel() == 1

    monkeypatch.setattr(GradientEngine, "_is_on_gpu", lambda engine: True)
    monkeypatch.setattr(update_agreement, "_is_on_gpu", is_number)


@contextlib.contextmanager
def gloo():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def wrap(module, group=SOLO, *, optimizer=torch.optim.AdamW, fused=True, lr=None, **options):
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True, bucket_size=10, **options)
    wrapper = DistributedDataParallel(module, config, process_group=group)
    rate = torch.tensor(0.01) if lr is None else lr
    kind = {"fused": True} if fused else {"foreach": True}
    inner = optimizer(module.parameters(), lr=rate, **kind)
    return wrapper, DataParallelOptimizer(inner, wrapper, max_norm=1.0, loss_scale="dynamic")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("collectives", ["auto", "torch"])
def test_a_step_reads_one_number_at_most(collectives, overlap, sharded, dtype, pretends):
    with gloo() as group:
        options = {"use_distributed_optimizer": sharded, "overlap_grad_reduce": overlap, "collectives": collectives}
        module = Experts(dtype)
        wrapper, optimizer = wrap(module, group, **options)
        for _ in range(3):
            with Operators() as before:
                optimizer.zero_grad()
                (wrapper(torch.ones(2, 4, dtype=dtype)).sum() * optimizer.loss_scale).backward()
                wrapper.finish_grad_sync()
            with Operators() as step:
                report = optimizer.step()
            assert not report.is_skipped
            assert before.scalar_reads == 0
            assert step.scalar_reads <= 1


def test_a_read_too_many_is_counted():
    """The twin of the test before: a learning rate on the CPU is read by the agreement."""
    wrapper, optimizer = wrap(Experts())
    wrapper(torch.ones(2, 4)).sum().backward()
    with Operators() as step:
        optimizer.step()
    assert step.scalar_reads >= 1


def test_a_copy_to_the_host_is_counted():
    with FakeTensorMode(), Operators() as operators:
        torch.zeros(1, device="cuda").to("cpu")
    assert operators.copies_to_host == 1


def count_operators(num_layers, dtype, *, fused, sharded, monkeypatch):
    module = Experts(dtype, num_layers)
    wrapper, optimizer = wrap(
        module, fused=fused, lr=0.01, use_distributed_optimizer=sharded, grad_reduce_in_fp32=dtype == torch.float32
    )
    update = optimizer._update
    counted = []

    def count(*args):
        with Operators() as operators:
            update(*args)
        counted.append([name for name in operators.names if not is_of_torch(name)])

    monkeypatch.setattr(optimizer, "_update", count)
    for _ in range(2):
        optimizer.zero_grad()
        wrapper(torch.ones(2, 4, dtype=dtype)).sum().backward()
        optimizer.step()
    return counted[-1]


def is_of_torch(name):
    """Reads of `step`, which torch's foreach implementation keeps on the CPU."""
    return name.startswith("_local_scalar_dense")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_the_number_of_operators_of_an_update_does_not_grow_with_the_model(sharded, fused, dtype, monkeypatch):
    """As many buckets, so that only the number of parameters differs."""
    few, many = (
        count_operators(number, dtype, fused=fused, sharded=sharded, monkeypatch=monkeypatch) for number in (2, 20)
    )
    assert sorted(set(few)) == sorted(set(many))
    assert len(many) == len(few)


class Parameters(torch.nn.Module):
    """Two dense parameters and two of an expert, on a GPU that is not there."""

    def __init__(self):
        super().__init__()
        self.params = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(4, 4, device="cuda")) for _ in range(4)])
        for param in self.params[2:]:
            param.allreduce = False


class Still(torch.optim.Optimizer):
    """Changes nothing: kernels of torch need a GPU."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.num_updated = 0

    def step(self, closure=None):
        self.num_updated += sum(param.grad is not None for group in self.param_groups for param in group["params"])


class Stream:
    def record_event(self):
        return None


class Answer:
    """What the host has read: numbers of the test's choice."""

    def __init__(self, numbers):
        self._numbers = numbers

    def numpy(self):
        return self._numbers


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Tensors that say that they are on a GPU, in the parts of torch that a build for CPUs lacks."""
    getitem = torch.Tensor.__getitem__

    def get(tensor, key):
        if not tensor.is_cuda:
            return getitem(tensor, key)
        if isinstance(key, int):
            return tensor.select(0, key)
        start, stop, _ = key.indices(len(tensor))
        return tensor.narrow(0, start, max(0, stop - start))

    monkeypatch.setattr(torch.Tensor, "__getitem__", get)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    dist.init_process_group("cuda:fake", rank=0, world_size=1, store=fake.FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("is_finite", [True, False])
def test_a_gpu_is_read_once_in_a_step(is_finite, pretended_gpu, monkeypatch):
    reads = []

    def read(waiter, tensor, what=""):
        reads.append(len(tensor))
        rows = np.zeros((3, len(tensor) // 3), dtype=np.int64)  # the labels, then the dense part, then the experts'
        # Behind the label, the number of gradients that are missing and seven digests.
        rows[1, 2 + 8] = np.iinfo(np.int64).max if is_finite else 1
        return Answer(rows.reshape(-1))

    monkeypatch.setattr(Waiter, "read", read)
    monkeypatch.setattr(torch_collectives, "_check_rows", lambda *_: None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = Parameters()
        options = {"overlap_grad_reduce": True, "collectives": "torch"}
        wrapper, optimizer = wrap(module, pretended_gpu, optimizer=Still, lr=0.01, **options)
        optimizer.param_groups[0]["lr"] = torch.zeros((), device="cuda")
        optimizer.zero_grad()
        for group in wrapper.engine.groups():
            for param in group.params:
                group.register_grad_ready(param)
            group.has_arrived[:] = [True] * len(group.has_arrived)
        with Operators() as operators:
            wrapper.finish_grad_sync()
            assert reads == []
            if is_finite:
                assert optimizer.step().norm == 0.0
                assert optimizer.optimizer.num_updated == 4
            else:
                with pytest.raises(NonFiniteGradientError, match=r"rank 0: .* that of params.\d in bucket \d is NaN"):
                    optimizer.step()
    assert len(reads) == 1
    # A scalar read of such a tensor raises; a copy to the host would be one more.
    assert operators.scalar_reads == operators.copies_to_host == 0


def test_numbers_on_a_gpu_are_not_read_where_they_stand_in_a_tuple(pretends):
    betas = torch.tensor(0.9), torch.tensor(0.99)
    options = {"lr": torch.tensor(0.1), "betas": betas, "eps": 1e-8}
    found = update_agreement.describe_options(options, reads_gpu=False)
    assert found == ["lr='a tensor'", "betas=('a tensor', 'a tensor')", "eps=1e-08"]
    assert update_agreement.numbers_on_gpu(options) == [options["lr"], *betas]
