"""Objects with large arrays in them, from one process to another.

`multiprocessing` copies an array four times on its way. Here it is copied once, to memory that both share; or where
that is full, written to the pipe from where it lies, and read to where it stays.
"""

import os
import pickle
import struct
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np

from trackbed.preprocess.shared_memory import Slots

__all__ = ["Received", "receive", "send"]

_NO_SLOT: Final = -1


class Received(NamedTuple):
    """What was sent."""

    message: Any
    slot: int | None
    """Where its arrays lie until somebody else is given the slot; None if they are the receiver's own."""


def send(connection: "Connection[Any, Any]", message: Any, slots: Slots | None = None, slot: int | None = None) -> bool:
    """Send an object that pickles.

    Args:
        connection: our end.
        message: the object.
        slots: memory that the other end has too.
        slot: one of them that is free; None for none.

    Returns:
        Whether it took the slot.
    """
    buffers: list[pickle.PickleBuffer] = []
    raw = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    is_shared = slots is not None and slot is not None and slots.fill(slot, views)
    used = slot if is_shared else _NO_SLOT
    head = struct.pack(f"<qq{len(views)}q", used, len(views), *map(len, views))
    connection.send_bytes(head + raw)  # at once: the other end wakes up once
    for view in () if is_shared else views:
        while view:
            view = view[os.write(connection.fileno(), view) :]
    return is_shared


def receive(connection: "Connection[Any, Any]", slots: Slots | None = None) -> Received:
    """Receive what `send` has sent.

    Raises:
        EOFError: the other end is gone.
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
