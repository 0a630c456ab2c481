"""Transfer of objects with large arrays between processes.

`multiprocessing` copies an array four times on the way. This module copies it once, to shared memory. If it does not
fit there, it is written to the pipe without a copy, and read into its final place.
"""

import os
import pickle
import struct
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np

from trackbed.preprocess.shared_memory import SharedSlots

__all__ = ["Received", "receive", "send"]

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
