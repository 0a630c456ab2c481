"""Layouts of parameters against those of megatron-core's buffers, over generated parameter lists."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig, param_and_grad_buffer

from tests.support.megatron_core.release import needs_the_wrappers_layouts
from trackbed.grads import ParameterSpec, plan_layout

pytestmark = needs_the_wrappers_layouts
NUMELS = st.one_of(
    st.integers(0, 300),
    st.integers(0, 10).map(lambda number: 64 * number),
    st.integers(0, 5_000_000),
    st.sampled_from([1, 63, 65, 127, 128, 129, 65_535, 65_536, 65_537, 50_000_000_000]),
)
RANKS = st.one_of(st.integers(1, 16), st.integers(1, 16_384), st.integers(0, 14).map(lambda power: 2**power))
BUCKET_SIZES = st.one_of(st.none(), st.integers(0, 1000), st.integers(0, 20_000_000), st.just(40_000_000))


class Ranks:
    """A group, as far as a buffer asks for it."""

    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size

    def rank(self):
        return 0


@pytest.fixture(autouse=True)
def megatron_without_memory(monkeypatch):
    """Megatron Core allocates on the current CUDA device, here one without memory, and logs over process groups."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "meta")
    monkeypatch.setattr(param_and_grad_buffer, "log_on_each_pipeline_stage", lambda *_, **__: None)


def buffer_of(parameters, *, ranks, bucket_size, sharded, pad_for_high_bandwidth):
    tensors = []
    for spec in parameters:
        tensors.append(torch.nn.Parameter(torch.empty(spec.numel, device="meta")))
        tensors[-1].shared_embedding = spec.shared_embedding
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, pad_buckets_for_high_nccl_busbw=pad_for_high_bandwidth
    )
    buffer = param_and_grad_buffer._ParamAndGradBuffer(
        config,
        torch.float32,
        torch.float32,
        tensors,
        Ranks(ranks),
        bucket_size,
        dict.fromkeys(tensors, ""),
        1.0,
        list(range(len(tensors))),
        False,
        SimpleNamespace(tp=Ranks(1), dp_cp=Ranks(ranks)),
    )
    return buffer, [buffer.param_index_map[tensor] for tensor in tensors]


@given(
    parameters=st.lists(
        st.builds(ParameterSpec, st.just("p"), NUMELS, st.integers(0, 4).map(lambda number: number == 0)),
        min_size=1,
        max_size=30,
    ),
    ranks=RANKS,
    bucket_size=BUCKET_SIZES,
    sharded=st.booleans(),
    pad_for_high_bandwidth=st.booleans(),
)
def test_layouts_equal_those_of_megatron_core(parameters, ranks, bucket_size, sharded, pad_for_high_bandwidth):
    options = {"bucket_size": bucket_size, "sharded": sharded, "pad_for_high_bandwidth": pad_for_high_bandwidth}
    layout = plan_layout(parameters, data_parallel_size=ranks, **options)
    buffer, index_map = buffer_of(parameters, ranks=ranks, **options)
    found = zip(layout.starts.tolist(), layout.stops.tolist(), layout.buckets.tolist(), strict=True)
    assert list(found) == index_map
    found = zip(layout.bucket_starts.tolist(), layout.bucket_stops.tolist(), strict=True)
    assert list(found) == buffer.bucket_indices
    assert layout.bucket_numel_unpadded.tolist() == [bucket.numel_unpadded for bucket in buffer.buckets]
    assert (layout.numel, layout.numel_unpadded) == (buffer.numel, buffer.numel_unpadded)
