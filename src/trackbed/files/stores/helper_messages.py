"""Messages between a forked process and its helper: pickles behind their length, over a socket that only the two have.

The control socket, which is the helper's standard input, carries one call socket per call. A call socket carries the
`Call`, with at most one file descriptor, and then `Progress` and `Page` messages and one `Result` or `Failure`.
"""

import pickle
import select
import socket
import struct
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "Call",
    "Failure",
    "Page",
    "Progress",
    "Result",
    "is_readable",
    "receive",
    "receive_call",
    "send",
    "send_call",
]

_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Call:
    """A function of `trackbed.files.stores` and its arguments."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Number of bytes that are done."""

    done: int


@dataclass(frozen=True, slots=True)
class Page:
    """Objects of a listing."""

    objects: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of the call, without the bytes, which are in shared memory."""

    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Error of the call."""

    error: Exception


def is_readable(connection: socket.socket, seconds: float) -> bool:
    """Waits until there is something to receive, or the other end has closed. Unlike `select`, for any descriptor."""
    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


def send(connection: socket.socket, message: object) -> None:
    """Sends a message."""
    raw = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(raw)) + raw)


def receive(connection: socket.socket) -> Any:
    """Receives a message.

    Raises:
        EOFError: the other end was closed.
    """
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    return pickle.loads(_receive_exactly(connection, size))


def send_call(connection: socket.socket, call: Call, descriptor: int | None) -> None:
    """Sends a call, and the file that it needs."""
    socket.send_fds(connection, [b"c"], [] if descriptor is None else [descriptor])
    send(connection, call)


def receive_call(connection: socket.socket) -> tuple[Call, int | None]:
    """Receives a call, and the descriptor of its file, which the caller closes."""
    first, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not first:
        raise EOFError
    return receive(connection), descriptors[0] if descriptors else None


def _receive_exactly(connection: socket.socket, size: int) -> bytearray:
    raw, done = bytearray(size), 0
    while done < size:
        received = connection.recv_into(memoryview(raw)[done:])
        if not received:
            raise EOFError
        done += received
    return raw
