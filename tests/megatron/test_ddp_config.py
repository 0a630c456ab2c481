"""Megatron Core's options of data parallelism."""

from dataclasses import fields

import pytest

from trackbed.errors import ArgumentError
from trackbed.megatron import DistributedDataParallelConfig

DEFAULTS = {
    "grad_reduce_in_fp32": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "align_param_gather": False,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "check_for_nan_in_grad": False,
    "check_for_large_grads": False,
    "bucket_size": None,
    "pad_buckets_for_high_nccl_busbw": False,
    "reduce_scatter_with_fp32_accumulation": False,
    "average_in_collective": False,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "use_megatron_fsdp": False,
    "use_custom_fsdp": False,
    "data_parallel_sharding_strategy": "no_shard",
    "gradient_reduce_div_fusion": True,
    "suggested_communication_unit_size": None,
    "preserve_fp32_weights": True,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "outer_dp_sharding_strategy": "no_shard",
    "disable_symmetric_registration": False,
    "fsdp_manual_registration": False,
    "delay_wgrad_compute": False,
}
"""Fields of Megatron Core 0.16.1, in order."""


def test_the_fields_are_megatrons_and_then_our_own():
    found = {option.name: option.default for option in fields(DistributedDataParallelConfig)}
    assert list(found.items()) == [*DEFAULTS.items(), ("collectives", "auto")]


def test_only_megatrons_fields_may_be_given_by_position():
    assert DistributedDataParallelConfig(*DEFAULTS.values()) == DistributedDataParallelConfig()
    with pytest.raises(TypeError, match="positional argument"):
        DistributedDataParallelConfig(*DEFAULTS.values(), "torch")


def test_options_that_the_wrapper_refuses_are_accepted_here():
    DistributedDataParallelConfig(
        use_megatron_fsdp=True, nccl_ub=True, fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collectives": "nccl"}, "collectives must be one of auto, torch, shared_memory, but is 'nccl'"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "needs fp8_param_gather=True, but that is False"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        DistributedDataParallelConfig(**options)
