"""Which buckets are communicated together."""

from collections.abc import Sequence

import torch

from trackbed.errors import GradientError
from trackbed.grads.bucket_group import _ParamAndGradBucketGroup
from trackbed.grads.buffer import _ParamAndGradBucket, _ParamAndGradBuffer

__all__ = ["partition_buckets"]


def partition_buckets(
    buffers: Sequence[_ParamAndGradBuffer],
    force_single_bucket_group: bool = False,  # noqa: FBT001, FBT002  Megatron Core's signature
) -> list[_ParamAndGradBucketGroup]:
    """Puts each bucket into a group of its own, with two exceptions.

    With 8-bit parameters, buckets of other types join the last group of the 8-bit buffer: its parameters are the first
    of the model, so by the time their gradients are there all others are too.

    Args:
        buffers: buffers of different types of parameters.
        force_single_bucket_group: True to put all buckets into one group.

    Raises:
        GradientError: two buffers have the same type of parameters, or the buffers of one group differ in options or
            process group.
    """
    if not buffers:
        return []
    by_type = {buffer.param_dtype: buffer for buffer in buffers}
    if len(by_type) != len(buffers):
        msg = f"buffers must have different types of parameters, but have {[buffer.param_dtype for buffer in buffers]}"
        raise GradientError(msg)
    if force_single_bucket_group:
        _check_alike(buffers)
        return [_group([bucket for buffer in buffers for bucket in buffer.buckets], buffers[0])]
    quantized = by_type.get(torch.uint8)
    if quantized is None:
        return [_group([bucket], buffer) for buffer in buffers for bucket in buffer.buckets]
    others = [bucket for buffer in buffers if buffer is not quantized for bucket in buffer.buckets]
    *first, last = quantized.buckets
    return [*(_group([bucket], quantized) for bucket in first), _group([last, *others], quantized)]


def _check_alike(buffers: Sequence[_ParamAndGradBuffer]) -> None:
    first = buffers[0]
    for buffer in buffers:
        if buffer.ddp_config != first.ddp_config or buffer.data_parallel_group != first.data_parallel_group:
            msg = (
                "buffers of one bucket group must have the same options and process group, but those of "
                f"{first.param_dtype} and {buffer.param_dtype} differ"
            )
            raise GradientError(msg)


def _group(buckets: list[_ParamAndGradBucket], buffer: _ParamAndGradBuffer) -> _ParamAndGradBucketGroup:
    return _ParamAndGradBucketGroup(
        buckets, buffer.ddp_config, buffer.data_parallel_group, buffer.data_parallel_world_size
    )
