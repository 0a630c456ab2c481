"""Memory that one process fills and another reads, so that large arrays need not go through a pipe."""

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing import reduction
from typing import Any, Final

__all__ = ["NUM_SLOTS", "Slots"]

NUM_SLOTS: Final = 8
_SLOT_BYTES: Final = 32 << 20  # of addresses: memory is taken when it is written to
_ALIGNMENT: Final = 64


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
        """New ones; None where the system has no files of memory, or no room for them."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            descriptor = os.memfd_create("trackbed-slots", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, NUM_SLOTS * _SLOT_BYTES)
            return cls(descriptor)
        except OSError:
            return None

    def __del__(self) -> None:
        os.close(self._descriptor)

    def __reduce__(self) -> Any:
        return _reopen, (reduction.DupFd(self._descriptor),)

    def fill(self, slot: int, buffers: Sequence[memoryview]) -> bool:
        """Copy the bytes of buffers to a slot, one behind the other. Returns whether they fit."""
        starts = _starts([len(buffer) for buffer in buffers])
        if starts[-1] > _SLOT_BYTES:
            return False
        for start, buffer in zip(starts, buffers, strict=False):
            at = slot * _SLOT_BYTES + start
            self._memory[at : at + len(buffer)] = buffer
        return True

    def views(self, slot: int, sizes: Sequence[int]) -> list[memoryview]:
        """What lies in a slot, in parts of these sizes in bytes."""
        memory = memoryview(self._memory)[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]
        return [memory[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=False)]


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin in a slot, aligned; and where they end."""
    return [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]


def _reopen(descriptor: Any) -> Slots:
    return Slots(descriptor.detach())
