"""Streams of a GPU wait for what they read, and sums on a GPU take few kernels. The GPU is pretended."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models.wrapped import layers
from trackbed.errors import ArgumentError
from trackbed.grads import DistributedDataParallel, DistributedDataParallelConfig, Timeline
from trackbed.grads.collectives import DONE, fp32_accumulation
from trackbed.grads.collectives.fp32_accumulation import _sum_rows
from trackbed.grads.engine import GradientEngine

SHARDED = {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True}


class Stream:
    """A stream, and the events for which it waits."""

    def __init__(self, number):
        self.stream_id = number
        self.waited = []

    def record_event(self):
        return f"behind stream {self.stream_id}"

    def wait_event(self, event):
        self.waited.append(event)


def test_a_stream_that_reads_parameters_first_takes_no_wait_from_the_others(monkeypatch):
    main, side = Stream(1), Stream(2)
    current = [main]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    wrapper = DistributedDataParallel(layers(4, 3), DistributedDataParallelConfig(**SHARDED))
    (group,) = wrapper.engine.groups()
    group._is_on_gpu = True
    for _ in range(2):
        main.waited.clear(), side.waited.clear()
        group.param_gather_handle = DONE
        current[0] = side
        assert wrapper.module[0].weight is not None
        assert group.param_gather_handle is None
        assert side.waited == []  # the work itself had it wait
        current[0] = main
        wrapper(torch.ones(2, 4)).sum()
        wrapper(torch.ones(2, 4)).sum()
        assert main.waited == ["behind stream 2"]
        current[0] = side
        wrapper(torch.ones(2, 4)).sum()
        assert side.waited == []


class Operators(TorchDispatchMode):
    """Counts sums."""

    num_sums = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_sums += "add" in function.__name__
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7, 8, 13])
def test_sums_on_a_gpu_have_the_order_of_those_on_a_cpu_and_a_kernel_for_each_level(
    num_ranks, divisor, dtype, monkeypatch
):
    rows = torch.randn(num_ranks, 50, generator=torch.Generator().manual_seed(num_ranks)).to(dtype)
    wanted, found = rows.clone(), rows.clone()
    _sum_rows(wanted, divisor)
    monkeypatch.setattr(fp32_accumulation, "SUMMABLE", ())
    with Operators() as operators:
        _sum_rows(found, divisor)
    assert torch.equal(found[0], wanted[0])
    assert operators.num_sums == math.ceil(math.log2(num_ranks))


def test_a_timeline_is_refused_where_operations_are_queued_on_a_gpu(monkeypatch):
    monkeypatch.setattr(GradientEngine, "_on_gpus", lambda engine: [object()])
    with pytest.raises(ArgumentError, match="observer: a Timeline must watch operations that the host waits for"):
        DistributedDataParallel(layers(4, 3), observer=Timeline())
