"""Options that the wrapper has, and their defaults that depend on the ranks."""

from dataclasses import replace
from typing import Final

from trackbed.errors import ArgumentError
from trackbed.grads.config import DistributedDataParallelConfig

__all__ = ["check_options", "with_bucket_size"]

_UNSUPPORTED: Final = (
    "fp8_param_gather",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "nccl_ub",
)
_SMALLEST_BUCKET: Final = 40_000_000
_PER_RANK: Final = 1_000_000


def check_options(config: DistributedDataParallelConfig) -> None:
    """Checks that the wrapper has the options, and that they do not contradict each other.

    Raises:
        ArgumentError: it has not, or they do.
    """
    if not isinstance(config, DistributedDataParallelConfig):
        msg = f"ddp_config must be Trackbed's DistributedDataParallelConfig, but is of {type(config).__name__}"
        raise ArgumentError(msg)
    for option in _UNSUPPORTED:
        if getattr(config, option):
            msg = f"{option} is not supported, and must be False"
            raise ArgumentError(msg)
    for option in ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"):
        if getattr(config, option) != "no_shard":
            msg = f"{option} must be 'no_shard', as FSDP is not supported, but is {getattr(config, option)!r}"
            raise ArgumentError(msg)
    size: object = config.bucket_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        msg = f"bucket_size must be a whole number of elements, at least 1, or None, but is {size!r}"
        raise ArgumentError(msg)
    for option, is_set in (
        ("overlap_param_gather", config.overlap_param_gather),
        ("num_distributed_optimizer_instances > 1", config.num_distributed_optimizer_instances > 1),
    ):
        if is_set and not config.use_distributed_optimizer:
            msg = f"{option} needs use_distributed_optimizer=True, but that is False"
            raise ArgumentError(msg)


def with_bucket_size(config: DistributedDataParallelConfig, num_ranks: int) -> DistributedDataParallelConfig:
    """Returns a copy with the bucket size that applies: large groups need large buckets to use their bandwidth."""
    size = None
    if config.overlap_grad_reduce:
        size = max(_SMALLEST_BUCKET, _PER_RANK * num_ranks) if config.bucket_size is None else config.bucket_size
    return replace(config, bucket_size=size)
