"""Buffers of parameters and gradients, and the communication of gradients between data-parallel ranks."""

from trackbed.grads.bucket_group import _ParamAndGradBucketGroup
from trackbed.grads.buffer import BufferType, _ParamAndGradBucket, _ParamAndGradBuffer, shard_buffer
from trackbed.grads.collectives.fp32_accumulation import reduce_scatter_with_fp32_accumulation
from trackbed.grads.config import DistributedDataParallelConfig
from trackbed.grads.ddp import DistributedDataParallel
from trackbed.grads.layout import Layout, ParameterPieces, ParameterSpec, plan_layout
from trackbed.grads.parameter_set import partition_buckets
from trackbed.grads.timeline import BucketEvent, BucketObserver, Timeline

__all__ = [
    "BucketEvent",
    "BucketObserver",
    "BufferType",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Layout",
    "ParameterPieces",
    "ParameterSpec",
    "Timeline",
    "_ParamAndGradBucket",
    "_ParamAndGradBucketGroup",
    "_ParamAndGradBuffer",
    "partition_buckets",
    "plan_layout",
    "reduce_scatter_with_fp32_accumulation",
    "shard_buffer",
]
