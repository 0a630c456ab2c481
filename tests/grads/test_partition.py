"""Which buckets are communicated together."""

import pytest
import torch

from tests.support.models.buffers import Ranks, new_buffer, parameters
from trackbed.errors import GradientError
from trackbed.grads import partition_buckets
from trackbed.megatron import DistributedDataParallelConfig

CONFIG = DistributedDataParallelConfig(grad_reduce_in_fp32=True)


def buffers(*dtypes):
    """A buffer of three buckets for each type of parameters, which is only a label."""
    shapes = [(2,)] * 3
    return [new_buffer(parameters(*shapes), bucket_size=1, param_dtype=dtype, config=CONFIG) for dtype in dtypes]


def test_no_buffers_have_no_groups():
    assert partition_buckets([]) == []
    assert partition_buckets([], force_single_bucket_group=True) == []


def test_each_bucket_has_a_group_of_its_own():
    two = buffers(torch.bfloat16, torch.float32)
    groups = partition_buckets(two)
    assert [group.buckets for group in groups] == [[bucket] for buffer in two for bucket in buffer.buckets]
    assert [group.params for group in groups[:3]] == [{param} for param in two[0].params[::-1]]


def test_one_group_holds_all_buckets_if_that_is_asked_for():
    two = buffers(torch.uint8, torch.bfloat16)
    (group,) = partition_buckets(two, True)
    assert group.buckets == two[0].buckets + two[1].buckets
    assert group.params == {*two[0].params, *two[1].params}


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_buckets_of_other_types_join_the_last_group_of_8_bits(order):
    all_buffers = [buffers(torch.uint8, torch.bfloat16, torch.float32)[place] for place in order]
    quantized = next(buffer for buffer in all_buffers if buffer.param_dtype == torch.uint8)
    others = [bucket for buffer in all_buffers if buffer is not quantized for bucket in buffer.buckets]
    groups = partition_buckets(all_buffers)
    assert [group.buckets for group in groups] == [
        [quantized.buckets[0]],
        [quantized.buckets[1]],
        [quantized.buckets[2], *others],
    ]


def test_buffers_of_8_bits_alone_have_a_group_for_each_bucket():
    (one,) = buffers(torch.uint8)
    assert [group.buckets for group in partition_buckets([one])] == [[bucket] for bucket in one.buckets]


def test_two_buffers_of_one_type_are_refused():
    with pytest.raises(GradientError, match="buffers must have different types of parameters"):
        partition_buckets(buffers(torch.bfloat16, torch.bfloat16))


def test_buffers_of_one_group_must_have_the_same_ranks_and_options():
    first, second = buffers(torch.bfloat16, torch.float32)
    second.data_parallel_group = Ranks(0, 2)
    with pytest.raises(GradientError, match="must have the same options and process group"):
        partition_buckets([first, second], force_single_bucket_group=True)
    second.data_parallel_group = first.data_parallel_group
    second.ddp_config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    with pytest.raises(GradientError, match="must have the same options and process group"):
        partition_buckets([first, second], force_single_bucket_group=True)
