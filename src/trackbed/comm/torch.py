"""The processes that `torch.distributed` knows."""

from dataclasses import dataclass

import torch.distributed

from trackbed.comm.group import Group

__all__ = ["TorchGroup", "current_group"]


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """The default process group of `torch.distributed`, as it was when this was made."""

    rank: int
    size: int


def current_group() -> Group | None:
    """All processes if `torch.distributed` was initialised, else None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return TorchGroup(rank=torch.distributed.get_rank(), size=torch.distributed.get_world_size())
