"""Process groups of a model under Megatron Core's names."""

from dataclasses import dataclass
from typing import Any

from trackbed.errors import ArgumentError
from trackbed.grads.agreement import GroupOfRanks, ProcessGroups


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
