"""The requests of a forked process, made by a helper program that it starts by exec.

obstore hangs or crashes in a process that was forked after the library was loaded, because its runtime has lost its
threads. The helper is `helper.py`. It ends when its control socket is closed: also if this process is killed.

Messages are pickles behind their length, over sockets that only the two processes have. The control socket, which is
the helper's standard input, carries one call socket per call. A call socket carries the `Call`, with at most one file
descriptor, then any number of `ProgressMessage` and `PageMessage`, and one `ResultMessage` or `FailureMessage`. Bytes
of objects are passed in memory that the two processes share.
"""

import atexit
import contextlib
import mmap
import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

from trackbed.cancellation import check_cancelled
from trackbed.errors import StoreError
from trackbed.files.stores.address import Address, ObjectRange, ObjectStamp
from trackbed.files.stores.requests import OutOfTimeError
from trackbed.files.stores.time_limit import timeout_seconds
from trackbed.files.stores.waiting import LOOK_SECONDS

_LIBRARIES: Final = ("obstore", "multistorageclient")
_state = {"is_forked": False}


def is_forked() -> bool:
    """True if requests must be made by a helper program."""
    return _state["is_forked"]


def _after_fork() -> None:
    # Loaded modules are inherited with the memory, so that a process that was forked after its parent had loaded a
    # library needs a helper, and so do its own children. One that was forked before can load the library itself.
    _state["is_forked"] = is_forked() or any(name in sys.modules for name in _LIBRARIES)


os.register_at_fork(after_in_child=_after_fork)


_LENGTH: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Call:
    """A function of `trackbed.files.stores` and its arguments."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ProgressMessage:
    """Number of bytes that are done."""

    done: int


@dataclass(frozen=True, slots=True)
class PageMessage:
    """Objects of a listing."""

    objects: list[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class ResultMessage:
    """Result of the call, without the bytes, which are in shared memory."""

    value: Any


@dataclass(frozen=True, slots=True)
class FailureMessage:
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


_PROGRAM: Final = "import sys; sys.path[:] = sys.argv[1:]; from trackbed.files.stores.helper import main; main()"
_START_SECONDS: Final = 10.0
"""Seconds that the helper may take to start, on a machine with much to do."""
_EXIT_SECONDS: Final = 2.0


class _Helper:
    """The helper of this process, started at the first call, and again if the environment has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._environment: dict[str, str] = {}

    def connect(self) -> socket.socket:
        """Returns the socket of a new call."""
        with self._lock:
            # The lock is held until the call has its socket: of two threads that make their first call at once, one
            # starts the helper, and neither replaces the other's while it connects. Endpoints and credentials are read
            # from the environment by the helper, so another environment needs another helper.
            environment = dict(os.environ)
            for _ in range(2):
                if self._process is None or self._process.poll() is not None or self._environment != environment:
                    self._start(environment)
                # The other end of the call is closed here as soon as the helper has it. Otherwise it would stay open
                # after the helper has ended, and the wait for an answer would not end.
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(_connected(self._control), [b"c"], [theirs.fileno()])
                    except ConnectionError:  # it has just ended
                        ours.close()
                        self._stop()
                    else:
                        return ours
        raise StoreError("the helper program of this forked process must start, found that it ended")

    def _start(self, environment: dict[str, str]) -> None:
        self._stop()
        ours, theirs = socket.socketpair()
        with theirs:
            # Only this process keeps the other end of the helper's standard input. The kernel closes it when this
            # process is killed, and then the helper ends, too.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *sys.path],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal is for this process, which ends the helper
            )
        self._control, self._environment = ours, environment

    def _stop(self) -> None:
        # The socket first: the helper ends when it is closed. A wait before that would always take its full time.
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS)
        self._control = self._process = None

    def stop(self) -> None:
        """Ends the helper."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """In a child of this process: closes the socket of the helper, which is the parent's."""
        # A thread of the parent may have held the lock at the fork. It does not exist here, so nobody would release it.
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0  # no child of this process
        if self._control is not None:
            self._control.close()
        self._control = self._process = None


_HELPER: Final = _Helper()
os.register_at_fork(after_in_child=_HELPER.forget)
atexit.register(_HELPER.stop)


def call(function: str, *arguments: Any) -> Any:
    """Calls a function of `helper.py` that needs no file."""
    return _call(Call(function, arguments))


def fetch(ranges: Sequence[ObjectRange], in_flight: int) -> list[memoryview]:
    """Fetches ranges; see `reads.fetch`."""
    ends = [0, *accumulate(one.stop - one.start for one in ranges)]
    with _shared_memory(ends[-1]) as (descriptor, area):
        # The helper raises the error of a call that takes too long, with the reason. This deadline is for a helper that
        # cannot, because it was stopped or is starting.
        deadline = time.monotonic() + timeout_seconds() + _START_SECONDS
        _call(Call("fetch", (list(ranges), in_flight)), descriptor, deadline=deadline)
    return [area[start:stop] for start, stop in pairwise(ends)]


def fetch_heads(
    addresses: Sequence[Address], num_bytes: int, in_flight: int
) -> list[tuple[ObjectStamp, memoryview] | Exception]:
    """Fetches the first bytes of objects; see `reads.fetch_heads`."""
    with _shared_memory(len(addresses) * num_bytes) as (descriptor, area):
        found = _call(Call("fetch_heads", (list(addresses), num_bytes, in_flight)), descriptor)
    starts = range(0, len(addresses) * num_bytes, num_bytes)
    return [
        one if isinstance(one, Exception) else (one[0], area[start : start + one[1]])
        for start, one in zip(starts, found, strict=True)
    ]


def stamps_of_objects(addresses: Sequence[Address], in_flight: int) -> list[ObjectStamp | Exception]:
    """Returns stamps of objects; see `reads.stamps_of_objects`."""
    found: list[ObjectStamp | Exception] = call("stamps_of_objects", list(addresses), in_flight)
    return found


def fetch_to_file(
    address: Address, stamp: ObjectStamp, descriptor: int, progress: Callable[[int], object] | None
) -> None:
    """Fetches a whole object into an open file; see `reads.fetch_to_file`."""
    _call(Call("fetch_to_file", (address, stamp)), descriptor, progress)


def put_file(address: Address, path: str | Path, progress: Callable[[int], object] | None) -> None:
    """Writes an object from a file; see `writes.put_file`."""
    _call(Call("put_file", (address, str(Path(path).absolute()))), None, progress)


def list_pages(folder: Address) -> Iterator[list[tuple[str, int]]]:
    """Yields pages of a listing; see `reads.list_pages`."""
    with _HELPER.connect() as connection:
        send_call(connection, Call("list_pages", (folder,)), None)
        for message in _messages(connection):
            if isinstance(message, PageMessage):
                yield message.objects


def _call(
    request: Call,
    descriptor: int | None = None,
    progress: Callable[[int], object] | None = None,
    *,
    deadline: float | None = None,
) -> Any:
    with _HELPER.connect() as connection:
        try:
            send_call(connection, request, descriptor)
        except ConnectionError:
            raise _ended() from None
        for message in _messages(connection, deadline):
            if isinstance(message, ProgressMessage) and progress is not None:
                progress(message.done)
            if isinstance(message, ResultMessage):
                return message.value
    raise _ended()


def _messages(connection: socket.socket, deadline: float | None = None) -> Iterator[Any]:
    """Yields the messages of the helper up to the result. The wait looks for Ctrl-C and cancellation."""
    while True:
        # In short steps, as in `waiting.is_done_by`. When an error leaves this loop, the caller closes the socket, and
        # the helper gives the call up at its next poll.
        while not is_readable(connection, LOOK_SECONDS):
            check_cancelled()
            if deadline is not None and time.monotonic() > deadline:
                where = "the helper program of this forked process"
                raise OutOfTimeError(where, "no answer")
        # A helper that was killed, as by the system when memory is short, closes its end: an error, and no wait without
        # end.
        try:
            message = receive(connection)
        except (EOFError, ConnectionError):
            raise _ended() from None
        if isinstance(message, FailureMessage):
            raise message.error
        yield message
        if isinstance(message, ResultMessage):
            return


def _ended() -> StoreError:
    return StoreError("the helper program of this forked process must answer, found that it ended")


def _connected(control: socket.socket | None) -> socket.socket:
    if control is None:
        raise _ended()
    return control


@contextlib.contextmanager
def _shared_memory(size: int) -> Iterator[tuple[int, memoryview]]:
    """Memory that lives as long as a part of it is referenced, and its descriptor, which is closed at the end."""
    descriptor = os.memfd_create("trackbed-stores", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(size, 1))
        yield descriptor, memoryview(mmap.mmap(descriptor, max(size, 1))).toreadonly()
    finally:
        os.close(descriptor)
