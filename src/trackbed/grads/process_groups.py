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


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Process groups over which a model is data-parallel. Each has `rank()` and `size()`."""

    dense: Any
    """All data-parallel ranks."""
    experts: Any
    """Ranks with the same experts."""

    @classmethod
    def of(cls, process_group: Any = None, expert_process_group: Any = None) -> "ProcessGroups":
        """Returns the groups of a wrapper's arguments.

        Args:
            process_group: torch's process group, or a `Group`; by default all ranks.
            expert_process_group: ranks with the same experts; by default `process_group`.

        Raises:
            ArgumentError: this process does not belong to a group, or is one of several and none was initialised.
        """
        ranks = _group_of(process_group)
        return cls(ranks, ranks if expert_process_group is None else _group_of(expert_process_group))


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
