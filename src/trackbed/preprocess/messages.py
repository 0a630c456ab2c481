"""Transfer of objects with large arrays between two processes.

`multiprocessing` copies an array four times on the way. This module copies it once, to shared memory. If it does not
fit there, it is written to the pipe without a copy, and read into its final place.
"""

import mmap
import os
import pickle
import struct
from collections.abc import Sequence
from itertools import accumulate
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np

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


_NO_SLOT: Final = -1


class Received(NamedTuple):
    """Message returned by `receive`."""

    message: Any
    slot: int | None
    """Slot that holds its arrays until the slot is reused; None if the receiver owns the arrays."""


def send(
    connection: "Connection[Any, Any]", message: Any, slots: SharedSlots | None = None, slot: int | None = None
) -> bool:
    """Sends a picklable object.

    Args:
        connection: this end of the pipe.
        message: the object.
        slots: memory shared with the other end.
        slot: number of a free slot; None to use none.

    Returns:
        True if the arrays were put into the slot.
    """
    buffers: list[pickle.PickleBuffer] = []
    raw = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    is_shared = slots is not None and slot is not None and slots.fill(slot, views)
    used = slot if is_shared else _NO_SLOT
    head = struct.pack(f"<qq{len(views)}q", used, len(views), *map(len, views))
    connection.send_bytes(head + raw)  # in one write, so that the other end wakes up once
    for view in () if is_shared else views:
        while view:
            view = view[os.write(connection.fileno(), view) :]
    return is_shared


def receive(connection: "Connection[Any, Any]", slots: SharedSlots | None = None) -> Received:
    """Receives an object sent by `send`.

    Raises:
        EOFError: the other end is closed.
    """
    received = connection.recv_bytes()
    slot, count = struct.unpack_from("<qq", received)
    sizes = struct.unpack_from(f"<{count}q", received, 16)
    raw = memoryview(received)[16 + 8 * count :]
    if slots is not None and slot != _NO_SLOT:
        return Received(pickle.loads(raw, buffers=slots.views(slot, sizes)), slot)
    buffers = [np.empty(size, dtype=np.uint8) for size in sizes]
    for buffer in buffers:
        view = buffer.data
        while view:
            count = os.readv(connection.fileno(), [view])
            if count == 0:
                raise EOFError
            view = view[count:]
    return Received(pickle.loads(raw, buffers=buffers), None)
