"""Buffers of parameters and gradients."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.models.buffers import Ranks, new_buffer, parameters
from trackbed.errors import GradientError
from trackbed.grads import (
    BufferType,
    DistributedDataParallelConfig,
    _ParamAndGradBucket,
    _ParamAndGradBuffer,
    shard_buffer,
)


def resident_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssShmem"))


def test_a_buffer_has_megatrons_attributes():
    params = parameters((2, 3), (4,))
    buffer = new_buffer(params, Ranks(1, 2), bucket_size=4, use_distributed_optimizer=True, factor=0.5)
    assert buffer.param_index_map == {params[1]: (0, 4, 0), params[0]: (128, 134, 1)}
    assert list(buffer.param_index_map) == params[::-1]
    assert buffer.bucket_indices == [(0, 128), (128, 256)]
    assert (buffer.numel, buffer.numel_unpadded) == (256, 10)
    assert (buffer.param_dtype, buffer.grad_dtype) == (torch.float32, torch.float32)
    assert (buffer.data_parallel_group, buffer.data_parallel_world_size) == (Ranks(1, 2), 2)
    assert (buffer.params, buffer.param_indices, buffer.gradient_scaling_factor) == (params, [0, 1], 0.5)
    assert buffer.param_to_bucket == {params[1]: buffer.buckets[0], params[0]: buffer.buckets[1]}
    bucket = buffer.buckets[1]
    assert (bucket.params_list, bucket.params) == ([params[0]], {params[0]})
    assert (bucket.offset, bucket.numel_unpadded, bucket.bucket_id) == (128, 6, 1)
    assert bucket.gradient_scaling_factor == 0.5
    assert bucket.param_to_index == {params[0]: (0, 6)}
    assert bucket.grad_data.data_ptr() == buffer.grad_data[128:].data_ptr()
    assert bucket.param_data.data_ptr() == buffer.param_data[128:].data_ptr()


def test_the_gradients_of_parameters_are_views():
    params = parameters((2, 3), (4,))
    buffer = new_buffer(params)
    assert buffer.param_data is None
    assert buffer.buckets[0].param_data is None
    assert buffer.grad_data.tolist() == [0.0] * 10
    params[0].main_grad.add_(2)
    params[1].main_grad[3] = 5
    assert buffer.grad_data.tolist() == [0, 0, 0, 5, *[2.0] * 6]
    assert params[0].main_grad.shape == (2, 3)
    buffer.scale_gradients(0.5)
    assert params[0].main_grad.sum() == 6
    buffer.reset()
    assert not buffer.grad_data.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_move_into_a_sharded_buffer_with_their_values(dtype):
    params = parameters((2, 3), (), (5,), dtype=dtype)
    before = [param.detach().clone() for param in params]
    buffer = new_buffer(params, Ranks(0, 2), use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    assert (buffer.param_data.dtype, buffer.grad_data.dtype) == (dtype, torch.float32)
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old)
        start, stop, _ = buffer.param_index_map[param]
        assert param.data_ptr() == buffer.param_data[start:stop].data_ptr()
        assert param.main_grad.dtype == torch.float32
    buffer.param_data.fill_(7)
    assert all((param == 7).all() for param in params)


def test_parameters_without_elements_take_no_room():
    params = parameters((0, 4), (3,), (0,))
    buffer = new_buffer(params, Ranks(0, 2), use_distributed_optimizer=True)
    assert [param.main_grad.shape for param in params] == [param.shape for param in params]
    assert buffer.numel == 128
    empty = new_buffer(parameters((0, 4)))
    assert (empty.numel, len(empty.buckets)) == (0, 1)
    empty.reset()
    empty.offload_to_cpu()
    empty.reload_from_cpu()


def test_two_parameters_of_one_tensor_have_gradients_of_their_own():
    tensor = torch.ones(4)
    params = [nn.Parameter(tensor), nn.Parameter(tensor)]
    new_buffer(params, use_distributed_optimizer=True)
    params[0].main_grad.fill_(1)
    assert params[1].main_grad.sum() == 0
    with torch.no_grad():
        params[0].fill_(3)
    assert params[1].tolist() == [1.0] * 4


def test_a_shared_embedding_has_a_bucket_of_its_own_where_the_buffer_is_sharded():
    params = parameters((4,), (4,), (4,))
    params[1].shared_embedding = True
    buffer = new_buffer(params, Ranks(0, 2), use_distributed_optimizer=True)
    assert [bucket.params_list for bucket in buffer.buckets] == [[params[2]], [params[1]], [params[0]]]
    assert len(new_buffer(parameters((4,), (4,))).buckets) == 1


def test_parameters_of_8_bits_keep_their_bytes_in_a_buffer_of_uint8():
    param = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    param._data = torch.arange(6, dtype=torch.uint8).view(2, 3)
    buffer = new_buffer([param], param_dtype=torch.uint8, use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    assert (buffer.param_data.dtype, buffer.grad_data.dtype) == (torch.uint8, torch.float32)
    assert buffer.param_data[:6].tolist() == list(range(6))
    assert param._data.data_ptr() == buffer.param_data.data_ptr()


def test_a_large_buffer_takes_no_memory_until_it_is_used():
    before = resident_bytes()
    buffer = new_buffer([nn.Parameter(torch.zeros(1).expand(1 << 28))])
    assert resident_bytes() - before < 1 << 22
    buffer.grad_data[0] = 1
    assert resident_bytes() - before < 1 << 23


def test_gradients_that_are_offloaded_give_their_memory_back_and_return_as_zeros():
    params = parameters((1 << 20,))
    buffer = new_buffer(params, use_distributed_optimizer=True)
    params[0].main_grad.fill_(3)
    held, view = resident_bytes(), params[0].main_grad
    buffer.offload_to_cpu()
    buffer.offload_to_cpu()
    assert held - resident_bytes() >= 1 << 22
    buffer.reload_from_cpu()
    assert params[0].main_grad is view
    assert not view.any()
    assert params[0][-1] == (1 << 20) - 1  # parameters on the CPU stay where they are
    view.fill_(2)
    assert buffer.grad_data.sum() == 2 << 20


def test_a_view_beyond_the_end_is_refused():
    buffer = new_buffer(parameters((4,)), use_distributed_optimizer=True)
    assert buffer._get(torch.Size([2, 2]), 124, BufferType.PARAM).shape == (2, 2)
    with pytest.raises(AssertionError, match=r"must have the elements \[125, 129\), but ends at 128"):
        buffer._get(torch.Size([2, 2]), 125, BufferType.GRAD)
    with pytest.raises(GradientError, match="but ends at 0"):
        new_buffer(parameters((4,)))._get(torch.Size([1]), 0, BufferType.PARAM)


def test_a_parameter_may_be_there_once_only():
    (param,) = parameters((4,))
    with pytest.raises(GradientError, match="each parameter must be there once"):
        new_buffer([param, param])
    with pytest.raises(GradientError, match="bucket 3: each parameter must be there once"):
        _ParamAndGradBucket([param, param], None, torch.zeros(8), 0, 8, 1.0, 3)


def test_a_vector_is_cut_into_equal_views():
    vector = torch.arange(6)
    shards = shard_buffer(vector, 3)
    assert [shard.tolist() for shard in shards] == [[0, 1], [2, 3], [4, 5]]
    shards[1][0] = 9
    assert vector[2] == 9
    with pytest.raises(GradientError, match="buffer must have a multiple of 4 elements, but has 6"):
        shard_buffer(vector, 4)


def test_kinds_of_buffers_have_megatrons_numbers():
    assert [(kind.name, kind.value) for kind in BufferType] == [("PARAM", 1), ("GRAD", 2)]


def test_a_bucket_that_is_made_anew_is_that_of_its_parameters():
    params = parameters((2, 3), (4,))
    buffer = new_buffer(params)
    buffer.param_to_bucket.clear()
    bucket = buffer._new_bucket(params[::-1], 0, buffer.numel, buffer.numel, 0)
    assert buffer.param_to_bucket == dict.fromkeys(params, bucket)


@pytest.mark.parametrize("kind", ["x", 1, 2, None, "GRAD", BufferType])
def test_another_kind_of_buffer_is_refused(kind):
    with pytest.raises(GradientError, match=r"buffer_type: must be BufferType\.PARAM or BufferType\.GRAD, found"):
        new_buffer(parameters((2,)))._get(torch.Size([1]), 0, kind)


def test_memory_that_is_registered_with_nccl_is_refused_by_the_buffer():
    params = parameters((2,))
    options = (DistributedDataParallelConfig(), torch.float32, torch.float32, params, Ranks(), None, {params[0]: "p"})
    with pytest.raises(GradientError, match="nccl_ub: must be False"):
        _ParamAndGradBuffer(*options, 1.0, [0], nccl_ub=True)
