"""Memory that one process fills and another reads, so that large arrays need not go through a pipe."""

import mmap
import os
from collections.abc import Sequence
from multiprocessing import reduction
from typing import Any, Final

__all__ = ["NUM_SLOTS", "Slots"]

NUM_SLOTS: Final = 8
_SLOT_BYTES: Final = 32 << 20  # of addresses: memory is taken when it is written to


class Slots:
    """Slots of shared memory, which whoever sends fills and whoever receives reads.

    Pickles on its way to a process that is being started. Its memory goes with the last of the two.

    Args:
        descriptor: an open file of memory.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, NUM_SLOTS * _SLOT_BYTES)

    @classmethod
    def create(cls) -> "Slots | None":
        """New ones, if the system has files of memory."""
        if not hasattr(os, "memfd_create"):
            return None
        descriptor = os.memfd_create("trackbed-slots", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, NUM_SLOTS * _SLOT_BYTES)
        return cls(descriptor)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def __reduce__(self) -> Any:
        return _reopen, (reduction.DupFd(self._descriptor),)

    def fill(self, slot: int, buffers: Sequence[memoryview]) -> bool:
        """Copy the bytes of buffers to a slot, one behind the other. Returns whether they fit."""
        if sum(map(len, buffers)) > _SLOT_BYTES:
            return False
        at = slot * _SLOT_BYTES
        for buffer in buffers:
            self._memory[at : at + len(buffer)] = buffer
            at += len(buffer)
        return True

    def views(self, slot: int, sizes: Sequence[int]) -> list[memoryview]:
        """What lies in a slot, in parts of these sizes in bytes."""
        found, at = [], slot * _SLOT_BYTES
        for size in sizes:
            found.append(memoryview(self._memory)[at : at + size])
            at += size
        return found


def _reopen(descriptor: Any) -> Slots:
    return Slots(descriptor.detach())
