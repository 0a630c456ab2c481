"""The processes that `torch.distributed` knows."""

import hashlib
import os
import uuid
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from trackbed.comm.store import Store
from trackbed.comm.store_group import StoreGroup
from trackbed.errors import ArgumentError, CollectiveError

if TYPE_CHECKING:
    from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]  # torch does not say that it exports

__all__ = ["TorchGroup", "current_group", "is_served_by_agent"]

_JOINED: Final[Counter[str]] = Counter()


class TorchGroup(StoreGroup):
    """A process group of `torch.distributed`, over the store that it was initialised with.

    Its backend, nccl or gloo or another, is not used. A group object works with those that the same process group was
    given to on the other ranks, in the order in which the objects first meet.

    Args:
        process_group: which processes; by default all.
        timeout_seconds: see `Group.timeout_seconds`; by default that of the store, which is what
            `init_process_group` was given.

    Raises:
        ArgumentError: this process does not belong to the group.
        CollectiveError: `torch.distributed` was not initialised.
    """

    def __init__(
        self, process_group: "dist.ProcessGroup | None" = None, *, timeout_seconds: float | None = None
    ) -> None:
        store: Any = _default_store()  # torch's own types do not know its timeout
        rank = dist.get_rank(process_group)
        if rank < 0:
            msg = f"process_group: this process must belong to it, but rank {dist.get_rank()} does not"
            raise ArgumentError(msg)
        ranks = dist.get_process_group_ranks(process_group)
        timeout_seconds = store.timeout.total_seconds() if timeout_seconds is None else timeout_seconds
        super().__init__(
            partial(_join, _name(process_group, ranks), timeout_seconds),
            rank=rank,
            size=len(ranks),
            timeout_seconds=timeout_seconds,
            store_host=ranks.index(0) if 0 in ranks and not is_served_by_agent() else None,
        )


_CURRENT: Final["WeakKeyDictionary[dist.ProcessGroup, TorchGroup]"] = WeakKeyDictionary()


def current_group() -> TorchGroup | None:
    """All processes if `torch.distributed` was initialised, else None. The same object each time."""
    world = dist.group.WORLD if dist.is_available() else None
    if world is None:
        return None
    if world not in _CURRENT:
        _CURRENT[world] = TorchGroup()
    return _CURRENT[world]


def is_served_by_agent(environment: Mapping[str, str] = os.environ) -> bool:
    """True if torchrun, and not the process of rank 0, holds the store."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _join(name: str, timeout_seconds: float) -> Store:
    """Keys that no other group has used, whatever restarts and shared servers there were."""
    # A build of torch may come without its stores, as long as nobody needs them.
    from trackbed.comm.torch_store import AnsweringStore, share_store

    _JOINED[name] += 1
    shared = _default_store()
    # Torch's own prefixes are lost on a connection of our own; this one, agreed on below them, is as good.
    meeting_point = AnsweringStore(shared, lambda: shared, answer_seconds=timeout_seconds / 2)
    prefix = meeting_point.set_first(f"trackbed/{name}/{_JOINED[name]}", uuid.uuid4().hex.encode()).decode()
    return share_store(shared, prefix, timeout_seconds=timeout_seconds)


def _name(process_group: "dist.ProcessGroup | None", ranks: list[int]) -> str:
    """Words for a process group: the same on its ranks, and not the same on those of another."""
    name = "all" if process_group is None else process_group.group_name
    return f"{name}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"


def _default_store() -> "TorchStore":
    """The store that all process groups meet over."""
    if not (dist.is_available() and dist.is_initialized()):
        msg = "torch.distributed: must be initialised for its processes to meet, but is not"
        raise CollectiveError(msg)
    try:
        return dist.distributed_c10d._get_default_store()  # noqa: SLF001  there is no public way to it
    except AttributeError:
        msg = f"{dist.__name__}: the store of the default process group must be there, found none"
        raise CollectiveError(msg) from None
