"""Limits on open maps and file descriptors: the least recently used ones are released, and opened again on demand.

A job reads thousands of datasets, each from several files. The system limits the memory maps (`vm.max_map_count`) and
the open files (`ulimit -n`) of a process, and a container often cannot change these limits.
"""

import logging
import os
import resource
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Final, Protocol

_MAPS_OF_LINUX: Final = 65_530
_MAX_DESCRIPTORS: Final = 1 << 20
_FEWEST: Final = 16
"""Lowest limit."""
logger = logging.getLogger(__name__)


class Holder(Protocol):
    """Owner of resources that it can open again."""

    def release(self) -> bool:
        """Drops references to resources, unless a running call uses them. True if it holds none afterwards."""
        ...


class ResourceLimit:
    """Counts resources of one kind, and releases the least recently used ones above a limit.

    A released resource is closed when its last reference is gone, so existing views stay valid.

    Args:
        max_open: returns the number of open resources from which on some are released.
    """

    def __init__(self, max_open: Callable[[], int]) -> None:
        self._max_open = max_open
        self._live: set[int] = set()
        self._holders: OrderedDict[int, weakref.ref[Holder]] = OrderedDict()
        self._lock = RLock()
        self._is_refused_anyway = False
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        """Replaces the lock, which another thread of the parent process may have held at the fork."""
        self._lock = RLock()

    @cached_property
    def max_open(self) -> int:
        """Number of open resources from which on some are released."""
        return max(self._max_open(), _FEWEST)

    @property
    def count(self) -> int:
        """Number of open resources."""
        return len(self._live)

    @property
    def is_tight(self) -> bool:
        """True if more than half of the limit is in use, so that the order of use matters."""
        return len(self._live) > self.max_open // 2

    def refused(self, reason: str) -> bool:
        """Learns from a refusal of the system: releases some resources, and stays below what was open then.

        Returns:
            True if some were released, so that another attempt may succeed.
        """
        with self._lock:
            before = len(self._live)
            if self._is_refused_anyway or before < _FEWEST:
                return False
            if before < self.max_open:
                self.max_open = max(before - before // 10, _FEWEST)
                logger.warning(
                    "the system has refused a further memory map, with %d in use: %s; this process keeps at most %d",
                    before,
                    reason,
                    self.max_open,
                )
        self.make_room()
        return len(self._live) < before

    def refused_again(self, reason: str) -> None:
        """Notes that the system refuses resources however few are in use: nothing more is released for them."""
        if not self._is_refused_anyway:
            self._is_refused_anyway = True
            logger.warning("the system refuses memory maps: %s; files are read without them", reason)

    def opened(self, name: int) -> None:
        """Records that a resource was opened, by its unique number."""
        self._live.add(name)

    def closed(self, name: int) -> None:
        """Records that a resource is closed. Call this before its number can be reused."""
        self._live.discard(name)

    def use(self, holder: Holder) -> None:
        """Records that a holder uses its resources now, so that it is released after those used earlier."""
        with self._lock:
            self._holders[id(holder)] = weakref.ref(holder)
            self._holders.move_to_end(id(holder))

    def make_room(self) -> None:
        """Releases resources if there are too many: a tenth of the limit at once, so that this is rare."""
        if len(self._live) < self.max_open:
            return
        with self._lock:
            for key in list(self._holders):
                if len(self._live) < self.max_open - self.max_open // 10:
                    return
                holder = self._holders.pop(key)()
                if holder is not None and not holder.release():
                    self.use(holder)


def _max_maps() -> int:
    """Half of the maps that the system allows a process: libraries and threads need some, too."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) // 2
    except (OSError, ValueError):
        return _MAPS_OF_LINUX // 2


def _max_descriptors() -> int:
    """Half of the files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(soft, _MAX_DESCRIPTORS) // 2 if soft > 0 else _MAX_DESCRIPTORS // 2


MAPS: Final = ResourceLimit(_max_maps)
DESCRIPTORS: Final = ResourceLimit(_max_descriptors)
