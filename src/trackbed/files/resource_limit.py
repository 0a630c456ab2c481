"""A bound on what a process may have open: whatever was used least recently is released, to be opened again.

A job reads thousands of datasets, each from several files. The system gives a process a number of memory maps
(`vm.max_map_count`) and of open files (`ulimit -n`), which a container often cannot change.
"""

import os
import resource
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Final, Protocol

__all__ = ["DESCRIPTORS", "MAPS", "Holder", "ResourceLimit"]

_MAPS_OF_LINUX: Final = 65_530
_MOST_DESCRIPTORS: Final = 1 << 20


class Holder(Protocol):
    """Holds resources that it can open again."""

    def release(self) -> bool:
        """Drop references to resources, unless a running call uses them. True if it holds none any more."""
        ...


class ResourceLimit:
    """Counts resources of one kind, and has those released that were used least recently.

    What is released goes when its last user is done with it: a view that somebody holds stays valid.

    Args:
        most: gives the number of resources from which on some are released.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self._most = most
        self._live: set[int] = set()
        self._holders: OrderedDict[int, weakref.ref[Holder]] = OrderedDict()
        self._lock = RLock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """Take a new lock: another thread of the process that was forked may have held the old one."""
        self._lock = RLock()

    @cached_property
    def most(self) -> int:
        """Resources from which on some are released."""
        return max(self._most(), 16)

    @property
    def count(self) -> int:
        """Resources that are open."""
        return len(self._live)

    @property
    def is_tight(self) -> bool:
        """True if it matters which resources were used last."""
        return len(self._live) > self.most // 2

    def opened(self, name: int) -> None:
        """Count a resource, by the number that names it."""
        self._live.add(name)

    def closed(self, name: int) -> None:
        """Count a resource no more; to be called before its number can be given to another one."""
        self._live.discard(name)

    def use(self, holder: Holder) -> None:
        """Record that a holder uses its resources now. It is released after those that were used before it."""
        with self._lock:
            self._holders[id(holder)] = weakref.ref(holder)
            self._holders.move_to_end(id(holder))

    def make_room(self) -> None:
        """Release resources if there are too many: a tenth of what may be open, so that this is rare."""
        if len(self._live) < self.most:
            return
        with self._lock:
            for key in list(self._holders):
                if len(self._live) < self.most - self.most // 10:
                    return
                holder = self._holders.pop(key)()
                if holder is not None and not holder.release():
                    self.use(holder)


def _most_maps() -> int:
    """Half of the maps that the system gives a process: libraries and threads need some, too."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) // 2
    except (OSError, ValueError):
        return _MAPS_OF_LINUX // 2


def _most_descriptors() -> int:
    """Half of the files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(soft, _MOST_DESCRIPTORS) // 2 if soft > 0 else _MOST_DESCRIPTORS // 2


MAPS: Final = ResourceLimit(_most_maps)
DESCRIPTORS: Final = ResourceLimit(_most_descriptors)
