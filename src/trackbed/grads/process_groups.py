"""Process groups over which a model's gradients are reduced."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from trackbed.comm import SOLO, Group
from trackbed.comm.torch import TorchGroup, check_initialized
from trackbed.errors import ArgumentError

__all__ = ["GroupOfRanks", "ProcessGroups", "messages_of"]


@dataclass(frozen=True, slots=True)
class GroupOfRanks:
    """A `Group` with the methods that Megatron Core expects of a process group."""

    group: Group = SOLO

    def rank(self) -> int:
        """Number of this process."""
        return self.group.rank

    def size(self) -> int:
        """Number of processes."""
        return self.group.size


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
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
    def of(cls, process_group: Any = None, expert_process_group: Any = None) -> "ProcessGroups":
        """Returns groups of pure data parallelism.

        Args:
            process_group: torch's process group, or a `Group`; by default all ranks.
            expert_process_group: ranks with the same experts; by default `process_group`.

        Raises:
            ArgumentError: this process does not belong to a group, or is one of several and none was initialised.
        """
        ranks = _group_of(process_group)
        experts = ranks if expert_process_group is None else _group_of(expert_process_group)
        alone = GroupOfRanks()
        return cls(
            dp_group=ranks,
            dp_cp_group=ranks,
            intra_dp_cp_group=ranks,
            expt_dp_group=experts,
            intra_expt_dp_group=experts,
            tp_group=alone,
            pp_group=alone,
            ep_group=alone,
        )

    @classmethod
    def of_collection(cls, collection: Any, *, has_instances: bool) -> "ProcessGroups":
        """Returns the groups of Megatron Core's `ProcessGroupCollection`.

        Args:
            collection: object with `dp`, and possibly `dp_cp`, `expt_dp`, `tp`, `pp` and `ep`.
            has_instances: True if there are several instances of the optimizer, which need `intra_dp_cp`,
                `intra_expt_dp` and `inter_dist_opt` too.

        Raises:
            ArgumentError: a group is missing.
        """
        needed = ("dp", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt") if has_instances else ("dp",)
        for name in needed:
            if getattr(collection, name, None) is None:
                msg = f"pg_collection must have the process group {name!r}, but does not"
                raise ArgumentError(msg)
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


def messages_of(process_group: Any) -> Group:
    """Group over which the ranks of a process group send each other messages, with its timeout."""
    if isinstance(process_group, GroupOfRanks):
        return process_group.group
    if process_group.size() == 1:
        return SOLO
    return TorchGroup(process_group)


def _group_of(process_group: Any) -> Any:
    if process_group is None:
        check_initialized("process_group")
        is_alone = not (dist.is_available() and dist.is_initialized())
        return GroupOfRanks() if is_alone else dist.group.WORLD
    if isinstance(process_group, int):  # torch gives a number to ranks that are not members
        msg = f"process_group: this process must belong to it, but rank {dist.get_rank()} does not"
        raise ArgumentError(msg)
    size = getattr(process_group, "size", None)
    if not (callable(size) or isinstance(size, int)):
        msg = f"process_group must be one of torch or a Group, but is of {type(process_group).__name__}"
        raise ArgumentError(msg)
    return process_group if callable(size) else GroupOfRanks(process_group)
