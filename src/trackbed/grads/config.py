"""Options of data parallelism, and their checks."""

from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, TypeVar

from trackbed.errors import ArgumentError

_COLLECTIVES: Final = ("auto", "torch", "shared_memory")
_SMALLEST_BUCKET: Final = 40_000_000
_PER_RANK: Final = 1_000_000


class ReductionOptions(Protocol):
    """Options that buffers, bucket groups and the engine read."""

    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    use_distributed_optimizer: bool
    check_for_nan_in_grad: bool
    check_for_large_grads: bool
    bucket_size: int | None
    pad_buckets_for_high_nccl_busbw: bool
    reduce_scatter_with_fp32_accumulation: bool
    average_in_collective: bool
    delay_wgrad_compute: bool
    collectives: Literal["auto", "shared_memory", "torch"]

    @property
    def align_param_gather(self) -> bool:
        """True if a forward pass begins no gather but those that it waits for."""
        ...

    @property
    def num_distributed_optimizer_instances(self) -> int:
        """Number of groups of ranks, each of which shards a whole optimizer."""
        ...


AnyOptions = TypeVar("AnyOptions", bound=ReductionOptions)


@dataclass(kw_only=True)
class DistributedDataParallelConfig:
    """Options of `DistributedDataParallel`.

    Numbers of elements count parameters. Megatron Core's configuration, with all its fields, is
    `trackbed.megatron.DistributedDataParallelConfig`.

    Raises:
        ArgumentError: `collectives` is unknown.
    """

    overlap_grad_reduce: bool = False
    """True to reduce each bucket as soon as its gradients are there, during the backward pass."""

    use_distributed_optimizer: bool = False
    """True to shard the optimizer: gradients are reduce-scattered and parameters gathered."""

    overlap_param_gather: bool = False
    """True to gather parameters while the next forward pass runs. Needs `use_distributed_optimizer`."""

    grad_reduce_in_fp32: bool = False
    """True to accumulate and reduce gradients in float32, for parameters of any type."""

    bucket_size: int | None = None
    """Number of elements from which a bucket is closed; None for the larger of 40,000,000 and 1,000,000 per rank.
    Without `overlap_grad_reduce` there is one bucket."""

    check_for_nan_in_grad: bool = False
    """True to refuse gradients with NaN or infinity: on CPUs before their bucket is reduced, on GPUs in the optimizer's
    step."""

    check_for_large_grads: bool = False
    """True to warn of a bucket whose norm is over 10 times the largest so far, before it is reduced."""

    average_in_collective: bool = False
    """True to let the collective average, rather than scale the gradients before a sum."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """True to send gradients in their own type and add them in float32."""

    pad_buckets_for_high_nccl_busbw: bool = False
    """True to pad sharded buckets to a multiple of 65,536 elements."""

    delay_wgrad_compute: bool = False
    """True if modules compute gradients of weights later than backward does, and call the hooks that the wrapper
    registers with `register_wgrad_accumulation_and_reduce_hooks`, as those of Transformer Engine do."""

    collectives: Literal["auto", "shared_memory", "torch"] = "auto"
    """Collectives for buffers on the CPU: "shared_memory" if all ranks are on one host, "torch" for those of the
    process group, or "auto" for shared memory where the ranks can map each other's memory. On a GPU, always "torch"."""

    def __post_init__(self) -> None:
        check_collectives(self)

    @property
    def align_param_gather(self) -> bool:
        """False: the gather of the next bucket begins when one is waited for."""
        return False

    @property
    def num_distributed_optimizer_instances(self) -> int:
        """1: one optimizer is sharded over all ranks."""
        return 1


def check_collectives(config: ReductionOptions) -> None:
    """Checks that the collectives of a configuration are known.

    Raises:
        ArgumentError: they are not.
    """
    if config.collectives not in _COLLECTIVES:
        raise ArgumentError(f"collectives must be one of {', '.join(_COLLECTIVES)}, but is {config.collectives!r}")


def check_options(config: ReductionOptions) -> None:
    """Checks that options do not contradict each other.

    Raises:
        ArgumentError: two do, or the bucket size is no number of elements.
    """
    size: object = config.bucket_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ArgumentError(f"bucket_size must be a whole number of elements, at least 1, or None, but is {size!r}")
    if config.overlap_param_gather and not config.use_distributed_optimizer:
        raise ArgumentError("overlap_param_gather needs use_distributed_optimizer=True, but that is False")


def with_bucket_size(config: AnyOptions, num_ranks: int) -> AnyOptions:
    """Returns a copy with the bucket size that applies: large groups need large buckets to use their bandwidth."""
    size = None
    if config.overlap_grad_reduce:
        size = max(_SMALLEST_BUCKET, _PER_RANK * num_ranks) if config.bucket_size is None else config.bucket_size
    return replace(config, bucket_size=size)  # type: ignore[type-var]  # each configuration is a dataclass
