"""Objects with large arrays in them, from one process to another.

`multiprocessing` copies an array four times on its way. Here it is written from where it lies, and read to where it
stays.
"""

import os
import pickle
import struct
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

__all__ = ["receive", "send"]


def send(connection: "Connection[Any, Any]", message: Any) -> None:
    """Send an object that pickles."""
    buffers: list[pickle.PickleBuffer] = []
    raw = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    connection.send_bytes(struct.pack(f"<{len(views)}q", *map(len, views)))
    connection.send_bytes(raw)
    for view in views:
        while view:
            view = view[os.write(connection.fileno(), view) :]


def receive(connection: "Connection[Any, Any]") -> Any:
    """Receive what `send` has sent.

    Raises:
        EOFError: the other end is gone.
    """
    sizes = connection.recv_bytes()
    raw = connection.recv_bytes()
    buffers = [np.empty(size, dtype=np.uint8) for (size,) in struct.iter_unpack("<q", sizes)]
    for buffer in buffers:
        view = buffer.data
        while view:
            count = os.readv(connection.fileno(), [view])
            if count == 0:
                raise EOFError
            view = view[count:]
    return pickle.loads(raw, buffers=buffers)
