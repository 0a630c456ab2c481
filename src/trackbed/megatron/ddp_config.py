"""Megatron Core's options and process groups of data parallelism."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

from trackbed.errors import ArgumentError
from trackbed.grads.config import check_collectives
from trackbed.grads.config import check_options as check_own_options
from trackbed.grads.model_agreement import GroupOfRanks, ProcessGroups

_UNSUPPORTED: Final = (
    "fp8_param_gather",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "nccl_ub",
)


@dataclass
class DistributedDataParallelConfig:
    """Options of `trackbed.megatron.DistributedDataParallel`: the fields of Megatron Core 0.16.1, then Trackbed's own.

    Numbers of elements count parameters. The wrapper refuses options of FSDP, of 8-bit parameters and of NCCL's user
    buffers, which Trackbed does not have; this class accepts them, because code for Megatron's FSDP uses it too.

    Raises:
        ArgumentError: options contradict each other.
    """

    grad_reduce_in_fp32: bool = False
    """True to accumulate and reduce gradients in float32, for parameters of any type."""

    overlap_grad_reduce: bool = False
    """True to reduce each bucket as soon as its gradients are there, during the backward pass."""

    overlap_param_gather: bool = False
    """True to gather parameters while the next forward pass runs. Needs `use_distributed_optimizer`."""

    align_param_gather: bool = False
    """True if the pipeline schedule starts the gather of parameters on all stages at the same time."""

    use_distributed_optimizer: bool = False
    """True to shard the optimizer: gradients are reduce-scattered and parameters gathered."""

    num_distributed_optimizer_instances: int = 1
    """Number of groups of ranks, each of which shards a whole optimizer, at least 1."""

    check_for_nan_in_grad: bool = False
    """True to refuse a bucket of gradients with NaN or infinity before it is reduced."""

    check_for_large_grads: bool = False
    """True to warn of a bucket whose norm is over 10 times the largest so far, before it is reduced."""

    bucket_size: int | None = None
    """Number of elements from which a bucket is closed; None for the larger of 40,000,000 and 1,000,000 per rank.
    Without `overlap_grad_reduce` there is one bucket."""

    pad_buckets_for_high_nccl_busbw: bool = False
    """True to pad sharded buckets to a multiple of 65,536 elements."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """True to send gradients in their own type and add them in float32."""

    average_in_collective: bool = False
    """True to let the collective average, rather than scale the gradients before a sum."""

    fp8_param_gather: bool = False
    """Not supported: gather parameters of 8 bits."""

    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    """Not supported: gather parameters of 8 bits in the buffer of gradients."""

    use_megatron_fsdp: bool = False
    """Not supported: option of Megatron's FSDP."""

    use_custom_fsdp: bool = False
    """Not supported: former name of `use_megatron_fsdp`."""

    data_parallel_sharding_strategy: str = "no_shard"
    """Not supported: option of Megatron's FSDP."""

    gradient_reduce_div_fusion: bool = True
    """Option of Megatron's FSDP, without effect here."""

    suggested_communication_unit_size: int | None = None
    """Option of Megatron's FSDP, without effect here."""

    preserve_fp32_weights: bool = True
    """Option of Megatron's FSDP, without effect here."""

    keep_fp8_transpose_cache: bool = False
    """Option of Megatron's FSDP, without effect here."""

    nccl_ub: bool = False
    """Not supported: allocate buffers that are registered with NCCL."""

    fsdp_double_buffer: bool = False
    """Option of Megatron's FSDP, without effect here."""

    outer_dp_sharding_strategy: str = "no_shard"
    """Option of Megatron's FSDP, without effect here."""

    disable_symmetric_registration: bool = False
    """Option of `nccl_ub`, without effect here."""

    fsdp_manual_registration: bool = False
    """Option of Megatron's FSDP, without effect here."""

    delay_wgrad_compute: bool = False
    """True if modules compute gradients of weights later than backward does, and call the hooks that the wrapper
    registers with `register_wgrad_accumulation_and_reduce_hooks`."""

    _: KW_ONLY

    collectives: Literal["auto", "shared_memory", "torch"] = "auto"
    """Collectives for buffers on the CPU: "shared_memory" if all ranks are on one host, "torch" for those of the
    process group, or "auto" for shared memory where the ranks can map each other's memory. On a GPU, always "torch"."""

    def __post_init__(self) -> None:
        if self.reuse_grad_buf_for_mxfp8_param_ag and not self.fp8_param_gather:
            raise ArgumentError("reuse_grad_buf_for_mxfp8_param_ag needs fp8_param_gather=True, but that is False")
        check_collectives(self)


def check_options(config: object) -> None:
    """Checks that the wrapper has the options, and that they do not contradict each other.

    Raises:
        ArgumentError: an option is not supported, or two contradict each other.
    """
    if not isinstance(config, DistributedDataParallelConfig):
        raise ArgumentError(
            "ddp_config must be trackbed.megatron's DistributedDataParallelConfig, but is of "
            f"{type(config).__module__}.{type(config).__qualname__}"
        )
    for option in _UNSUPPORTED:
        if getattr(config, option):
            raise ArgumentError(f"{option} is not supported, and must be False")
    for option in ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"):
        if getattr(config, option) != "no_shard":
            raise ArgumentError(
                f"{option} must be 'no_shard', as FSDP is not supported, but is {getattr(config, option)!r}"
            )
    check_own_options(config)
    if config.num_distributed_optimizer_instances > 1 and not config.use_distributed_optimizer:
        raise ArgumentError(
            "num_distributed_optimizer_instances > 1 needs use_distributed_optimizer=True, but that is False"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronGroups:
    """Process groups under Megatron Core's names. Each has `rank()` and `size()`."""

    dp_group: Any
    """Ranks with the same part of the model."""
    dp_cp_group: Any
    """The same, and those with other parts of the same sequences: all over which gradients are averaged."""
    intra_dp_cp_group: Any
    """Ranks that shard one optimizer; `dp_cp_group` if there is one optimizer."""
    expt_dp_group: Any
    """Ranks with the same experts."""
    intra_expt_dp_group: Any
    """Ranks that shard one optimizer of the same experts."""
    tp_group: Any
    pp_group: Any
    ep_group: Any
    inter_dist_opt_group: Any = None
    """Ranks with the same shard in each instance of the optimizer."""

    @classmethod
    def of(cls, groups: ProcessGroups) -> "MegatronGroups":
        """Returns groups of pure data parallelism."""
        alone = GroupOfRanks()
        return cls(
            dp_group=groups.dense,
            dp_cp_group=groups.dense,
            intra_dp_cp_group=groups.dense,
            expt_dp_group=groups.experts,
            intra_expt_dp_group=groups.experts,
            tp_group=alone,
            pp_group=alone,
            ep_group=alone,
        )

    @classmethod
    def of_collection(cls, collection: Any, *, has_instances: bool) -> "MegatronGroups":
        """Returns the groups of Megatron Core's `ProcessGroupCollection`.

        Args:
            collection: object with `dp`, and possibly `dp_cp`, `expt_dp`, `tp`, `pp` and `ep`.
            has_instances: True if there are several instances of the optimizer, which need `intra_dp_cp`,
                `intra_expt_dp` and `inter_dist_opt` too.
        """
        needed = ("dp", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt") if has_instances else ("dp",)
        for name in needed:
            if getattr(collection, name, None) is None:
                raise ArgumentError(f"pg_collection must have the process group {name!r}, but does not")
        alone = GroupOfRanks()
        ranks = getattr(collection, "dp_cp", None) or collection.dp
        experts = getattr(collection, "expt_dp", None) or alone
        return cls(
            dp_group=collection.dp,
            dp_cp_group=ranks,
            intra_dp_cp_group=collection.intra_dp_cp if has_instances else ranks,
            expt_dp_group=experts,
            intra_expt_dp_group=collection.intra_expt_dp if has_instances else experts,
            tp_group=getattr(collection, "tp", None) or alone,
            pp_group=getattr(collection, "pp", None) or alone,
            ep_group=getattr(collection, "ep", None) or alone,
            inter_dist_opt_group=getattr(collection, "inter_dist_opt", None),
        )
