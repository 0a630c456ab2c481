"""Shared memory that passes large arrays between two processes without a pipe."""

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing import reduction
from typing import Any, Final

__all__ = ["NUM_SLOTS", "SharedSlots"]

NUM_SLOTS: Final = 8
_SLOT_BYTES: Final = 32 << 20  # of address space: pages are allocated on first write
_ALIGNMENT: Final = 64


class SharedSlots:
    """Slots of shared memory, written by the sender and read by the receiver.

    Picklable only while a child process is started. The memory is freed when both processes have released it.

    Args:
        descriptor: file descriptor of an anonymous memory file (`memfd_create`).
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, NUM_SLOTS * _SLOT_BYTES)

    @classmethod
    def create(cls) -> "SharedSlots | None":
        """Allocates new slots; None if the system has no anonymous memory files, or too little memory."""
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
        """Copies buffers into a slot, one after the other. Returns False if they do not fit."""
        starts = _starts([len(buffer) for buffer in buffers])
        if starts[-1] > _SLOT_BYTES:
            return False
        for start, buffer in zip(starts, buffers, strict=False):
            at = slot * _SLOT_BYTES + start
            self._memory[at : at + len(buffer)] = buffer
        return True

    def views(self, slot: int, sizes: Sequence[int]) -> list[memoryview]:
        """Returns views of the buffers in a slot, given their sizes in bytes."""
        memory = memoryview(self._memory)[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES]
        return [memory[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=False)]


def _starts(sizes: Sequence[int]) -> list[int]:
    """Returns the aligned offsets of buffers of these sizes in a slot, followed by their end."""
    return [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]


def _reopen(descriptor: Any) -> SharedSlots:
    return SharedSlots(descriptor.detach())
