"""Devices from which process groups of torch send, however their backends are given. Devices are pretended."""

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg as fake
from torch._subclasses.fake_tensor import FakeTensorMode

from trackbed.comm import SOLO
from trackbed.comm.torch_group import backends_of, device_for
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig
from trackbed.grads.bucket_group import _ParamAndGradBucketGroup
from trackbed.grads.collectives import SoloCollectives, TorchCollectives
from trackbed.grads.collectives.torch import TorchWork, _works_of
from trackbed.grads.failure_aware_wait import Waiter
from trackbed.grads.gradient_check import norm_of

CUDA = torch.device("cuda", 3)


@contextlib.contextmanager
def process_group(backend, size=4):
    store = fake.FakeStore() if backend is not None and "fake" in backend else dist.HashStore()
    dist.init_process_group(backend, rank=0, world_size=size, store=store)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [("cuda:fake", ["cuda"]), ("fake", ["cpu", "cuda"]), ("gloo", ["cpu"]), (None, ["cpu"]), ("cpu:gloo", ["cpu"])],
)
def test_backends_are_known_however_they_were_given(backend, kinds):
    with process_group(backend, size=4 if backend and "fake" in backend else 1) as group:
        assert set(kinds) <= set(backends_of(group))
        device = torch.device("cpu") if "cpu" in kinds else CUDA
        assert device_for(group, near=CUDA) == device
        assert device_for(None, near=CUDA) == device


class Bound:
    """A process group that is bound to a device."""

    bound_device_id = torch.device("cuda", 5)


@pytest.mark.parametrize(
    ("config", "near", "expected"),
    [
        ("cpu:gloo,cuda:nccl", CUDA, "cpu"),
        ("cuda:nccl", CUDA, "cuda:3"),
        ("cuda:nccl", None, "cuda:5"),
        ("cuda:nccl", torch.device("cpu"), "cuda:5"),
        ("cpu:gloo,cuda:gloo", None, "cpu"),
    ],
)
def test_a_group_without_the_cpu_sends_from_the_buffers_or_the_device_it_is_bound_to(
    config, near, expected, monkeypatch
):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert device_for(Bound(), near=near) == torch.device(expected)


def test_a_group_that_is_bound_to_nothing_sends_from_the_current_device(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 2)
    assert device_for(object()) == torch.device("cuda", 2)


def test_exchange_and_broadcast_work_without_a_backend_for_the_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    with process_group("cuda:fake") as group, FakeTensorMode(allow_non_fake_inputs=True):
        ranks = TorchCollectives(group, device=CUDA)
        exchange = ranks.exchange(np.zeros(2, dtype=np.int64))
        Waiter().wait(exchange.work, "exchange")
        content = torch.zeros(8, dtype=torch.uint8)
        work = ranks.broadcast([content, torch.zeros(3, 2, device="cuda"), torch.zeros(2, 3).t()], source=1)
        Waiter().wait(work, "broadcast")
        assert work.is_done()


def test_meetings_of_a_checkpoint_work_without_a_backend_for_the_cpu(monkeypatch):
    from trackbed.checkpoint.plan import exchange
    from trackbed.checkpoint.ranks import Meeting

    sent = []
    with process_group("cuda:fake") as group, FakeTensorMode(allow_non_fake_inputs=True):
        met = Meeting(SOLO, contextlib.nullcontext(), group)
        monkeypatch.setattr(type(met), "size", property(lambda _: 4))
        monkeypatch.setattr(Meeting, "wait", lambda _, work: sent.append(work))
        monkeypatch.setattr(dist, "all_to_all_single", lambda *tensors, **_: tensors[:2])
        exchange._all_to_all(met, [[torch.zeros(8, dtype=torch.uint8)]] * 4, [8] * 4)
    assert [tensor.device.type for tensor in sent[0]] == ["cuda", "cuda"]


def test_the_manager_of_coalesced_operations_is_no_work():
    manager = dist.distributed_c10d._CoalescingManager()

    class Over:
        def is_completed(self):
            return True

        def wait(self):
            return True

    manager.append(Over())
    work = TorchWork(_works_of([None], manager), waits_on_host=False)
    assert work.is_done()
    assert work.wait()


@pytest.mark.parametrize("backend", ["cuda:fake", "fake"])
def test_two_buffers_of_a_group_on_a_device_are_reduced(backend):
    with process_group(backend) as group, FakeTensorMode(allow_non_fake_inputs=True):
        ranks = TorchCollectives(group, device=CUDA)
        buffers = [torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda", dtype=torch.bfloat16)]
        work = ranks.all_reduce(buffers, scale=0.25, average=False, label=(0, 0))
        Waiter().wait(work, "reduction")
        assert work.is_done()


def test_one_rank_uses_torch_if_it_is_told_to():
    model = torch.nn.Linear(2, 2)
    with process_group("gloo", size=1):
        for is_sharded in (False, True):
            config = DistributedDataParallelConfig(collectives="torch", use_distributed_optimizer=is_sharded)
            wrapper = DistributedDataParallel(model, config)
            assert isinstance(wrapper.engine.dense_collectives, TorchCollectives)
            wrapper.zero_grad_buffer()
            wrapper(torch.ones(1, 2)).sum().backward()
            wrapper.finish_grad_sync()
            assert model.weight.main_grad.tolist() == [[1, 1], [1, 1]]
            assert wrapper.engine.exchange(np.arange(3)).tolist() == [[0, 1, 2]]
        other = DistributedDataParallel(model, DistributedDataParallelConfig())
        assert isinstance(other.engine.dense_collectives, SoloCollectives)
    alone = DistributedDataParallel(model, DistributedDataParallelConfig(collectives="torch"), process_group=SOLO)
    assert isinstance(alone.engine.dense_collectives, SoloCollectives)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_of_a_bucket_is_at_least_of_float32(dtype):
    assert norm_of(torch.full((1 << 16,), 300.0, dtype=dtype)) == pytest.approx(300 * 256, rel=1e-3)
    assert norm_of(torch.tensor([float("nan")], dtype=dtype)) != norm_of(torch.zeros(1, dtype=dtype))


def test_large_gradients_of_16_bits_pass_the_check_for_nan():
    model = torch.nn.Linear(256, 256, bias=False).half()
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    wrapper = DistributedDataParallel(model, config, process_group=SOLO)
    (wrapper.module.weight * 300).sum().backward()
    assert float(model.weight.grad.float().norm()) == pytest.approx(300 * 256, rel=1e-3)
    assert isinstance(wrapper.engine.groups()[0], _ParamAndGradBucketGroup)


def test_buffers_of_several_types_are_sent_one_by_one(monkeypatch):
    """NCCL's all-reduce takes several tensors as one operation if they have one type."""
    monkeypatch.setattr("trackbed.grads.collectives.torch.backends_of", lambda group: {"cpu": "nccl"})
    managers = []
    monkeypatch.setattr(
        dist.distributed_c10d, "_coalescing_manager", lambda *_, **__: managers.append(1) or contextlib.nullcontext()
    )
    ranks = TorchCollectives(None)
    types = [torch.float32, torch.bfloat16, torch.float32]
    buffers = [torch.zeros(4, dtype=dtype) for dtype in types]
    for chosen, count in (([0, 1], 0), ([0, 2], 1), ([0], 1)):
        with ranks._coalesced([buffers[number] for number in chosen]):
            pass
        assert len(managers) == count


class LateCopy:
    """gloo's work for a tensor on a GPU: what was received is copied into it at the end, here with the next work."""

    last = None

    def __init__(self, tensor):
        self.tensor = tensor
        if LateCopy.last is not None:
            LateCopy.last.wait()
        LateCopy.last = self

    def is_completed(self):
        return False

    def wait(self, timeout=None):
        self.tensor.add_(0)
        self.is_completed = lambda: True
        return True


@pytest.mark.parametrize("sharded", [False, True])
def test_what_gloo_copies_into_a_buffer_is_no_change_by_the_program(sharded, monkeypatch):
    with process_group("gloo", size=1) as group:
        config = DistributedDataParallelConfig(
            overlap_grad_reduce=True, use_distributed_optimizer=sharded, collectives="torch", bucket_size=10
        )
        layers = [torch.nn.Linear(3, 3) for _ in range(4)]
        model = DistributedDataParallel(torch.nn.Sequential(*layers), config, process_group=group)
        monkeypatch.setattr(dist, "all_reduce", lambda buffer, **_: LateCopy(buffer))
        monkeypatch.setattr(
            "trackbed.grads.collectives.torch.receive_shards", lambda shard, buffer, group, divisor: LateCopy(shard)
        )
        for _ in range(2):
            model.zero_grad_buffer()
            model(torch.ones(2, 3)).sum().backward()
            model.finish_grad_sync()
