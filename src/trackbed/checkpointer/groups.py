"""Groups that serve the saves of one checkpointer alone."""

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch.distributed as dist

from trackbed.checkpoint.ranks import Ranks
from trackbed.comm import SOLO, Group
from trackbed.comm.torch_group import TorchGroup, current_group

_numbers: Final["WeakKeyDictionary[Any, Iterator[int]]"] = WeakKeyDictionary()
"""Numbers of the next checkpointer of each group, the same on all ranks."""


def groups_of(group: Ranks) -> tuple[Ranks, Group]:
    """Collective over the ranks: returns ranks for the calls of the program, and a group for those of its threads.

    Neither is used for anything else, so nothing that training does can come between their messages. The threads meet
    in children of the second one.
    """
    members: Any = group
    if hasattr(group, "guarded"):
        number = next(_numbers.setdefault(group, itertools.count())) if group is not SOLO else 0
        return members.child(f"checkpointer {number}"), members.child(f"checkpointer {number} threads")
    whole = current_group()
    if whole is None:
        return SOLO, SOLO
    ranks = None if group is None else dist.get_process_group_ranks(group)
    timeout = timedelta(seconds=(whole if group is None else TorchGroup(group)).timeout_seconds)
    calls = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=ranks is not None)
    return calls, TorchGroup(calls)
