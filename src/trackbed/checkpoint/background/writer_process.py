"""A process that writes the snapshots of one rank, so that no thread of the training program does.

It maps the memory of the snapshot, writes the file, and says what it has written; it takes part in no meeting, and
never gives a folder its name. It ends with the program: when its connection is closed, or its parent is another one.
"""

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from trackbed.checkpoint.background.priority import lower_priority
from trackbed.checkpoint.background.slab import Slab, view_of_memory
from trackbed.checkpoint.io.targets import Target
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.daemon_threads import call_on_thread
from trackbed.errors import CheckpointError

_POLL_SECONDS: Final = 0.05
_BEAT_SECONDS: Final = 0.5
_END_SECONDS: Final = 5.0
_MOST_SILENT_SECONDS: Final = 600.0
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_READY: Final = "ready"
_PROGRAM: Final = f"import sys; sys.path[:] = sys.argv[4:]; from {__name__} import main; main()"

_Item = tuple[str, tuple[int, ...], int] | bytes
"""Type, shape and first byte of a tensor in the memory; or the bytes of an object."""


@dataclass(slots=True)
class _Running:
    """A process, and the connections to it."""

    process: "subprocess.Popen[bytes]"
    connection: Connection
    descriptors: socket.socket
    serial: int = 0
    """Number of the memory that it has mapped."""


class WriterProcess:
    """Writes files in a process, which is started when it is needed, and again after it has ended.

    Args:
        silent_seconds: time without a sign of life after which the process is given up.
    """

    def __init__(self, silent_seconds: float) -> None:
        self._silent_seconds = min(silent_seconds, _MOST_SILENT_SECONDS)
        self._running: _Running | None = None

    @property
    def pid(self) -> int | None:
        """Number of the process; None if there is none."""
        return None if self._running is None else self._running.process.pid

    def start(self) -> None:
        """Starts the process, unless it runs. Does not wait until it is ready.

        Raises:
            OSError: it cannot be started.
        """
        if self._running is not None and self._running.process.poll() is None:
            return
        self.end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        our_descriptors, their_descriptors = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, their_descriptors:
            numbers = [theirs.fileno(), their_descriptors.fileno()]
            # `-P`, and the path of this process: a module of the working directory must not take the place of another.
            arguments = [*map(str, numbers), str(os.getpid()), *sys.path]
            command = [sys.executable, "-P", "-c", _PROGRAM, *arguments]
            # Signals to all processes of a job, such as SIGTERM, are for the program, which may save because of them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
            try:
                process = subprocess.Popen(command, pass_fds=numbers, stdin=subprocess.DEVNULL)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._running = _Running(process, Connection(ours.detach()), our_descriptors)

    def wait_until_ready(self, poll: Callable[[], None]) -> None:
        """Waits until the process has imported what it needs.

        Args:
            poll: called again and again; may raise to end the wait.

        Raises:
            CheckpointError: it has ended, or gives no sign of life.
            OSError: it cannot be started.
        """
        self.start()
        running = self._running
        if running is None:
            return
        try:
            running.connection.send(_READY)
            self._answer(running, poll)
        except (OSError, EOFError) as error:
            raise CheckpointError(self._how_it_ended(running, error)) from error
        except BaseException:
            self._cancel(running)
            raise

    def write(
        self,
        target: Target,
        values: Sequence[torch.Tensor | bytes],
        slab: Slab,
        poll: Callable[[], None],
        *,
        direct: bool,
    ) -> WrittenFiles:
        """Writes values, and waits for it.

        Args:
            target: where to write.
            values: tensors in the slab, and bytes.
            slab: memory of the tensors.
            poll: called again and again; may raise to end the work.
            direct: True to write past the page cache where the file system allows it.

        Raises:
            CheckpointError: the process has failed, has ended, or gives no sign of life.
        """
        self.start()
        running = self._running
        if running is None:
            raise CheckpointError("the writer process must run, but does not")
        try:
            if slab.serial != running.serial:
                socket.send_fds(running.descriptors, [b"\0"], [slab.descriptor])
                running.serial = slab.serial
            items = [_item_of(value, slab) for value in values]
            running.connection.send((target, direct, slab.serial, slab.num_bytes, items))
            return WrittenFiles.decode(self._answer(running, poll))
        except (OSError, EOFError) as error:
            raise CheckpointError(self._how_it_ended(running, error)) from error
        except BaseException:
            self._cancel(running)
            raise

    def end(self) -> None:
        """Ends the process."""
        running, self._running = self._running, None
        if running is None:
            return
        running.connection.close()
        running.descriptors.close()
        try:
            running.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()

    def _answer(self, running: _Running, poll: Callable[[], None]) -> bytes:
        """Waits for what the process has written."""
        last = time.monotonic()
        while True:
            if running.connection.poll(_POLL_SECONDS):
                kind, content = running.connection.recv()
                last = time.monotonic()
                if kind == "written":
                    return bytes(content)
                if kind == "failed":
                    raise CheckpointError(f"writer process {running.process.pid}: {content}")
            elif time.monotonic() - last > self._silent_seconds:
                raise CheckpointError(
                    f"writer process {running.process.pid}: must write, but has given no sign of life for "
                    f"{self._silent_seconds:g} s"
                )
            poll()

    def _cancel(self, running: _Running) -> None:
        """Has the process end its work; if it does not answer soon, it is killed."""
        with suppress(OSError, EOFError):
            running.connection.send(None)
            deadline = time.monotonic() + _END_SECONDS
            while time.monotonic() < deadline:
                if running.connection.poll(_POLL_SECONDS) and running.connection.recv()[0] != "beat":
                    return
                if running.process.poll() is not None:
                    break
        running.process.kill()
        self.end()

    def _how_it_ended(self, running: _Running, error: BaseException) -> str:
        try:
            status = running.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            running.process.kill()
            status = running.process.wait()
        self.end()
        how = f"was ended by signal {-status}" if status < 0 else f"has ended with status {status}"
        return f"writer process {running.process.pid}: must write, but {how} ({type(error).__name__})"


def _item_of(value: torch.Tensor | bytes, slab: Slab) -> _Item:
    if isinstance(value, bytes):
        return value
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), slab.place_of(value)


def _serve(connection: Connection, descriptors: socket.socket, parent: int) -> None:
    """Writes what is asked for, until the program ends."""
    lower_priority()
    memory: mmap.mmap | None = None
    mapped = 0
    while True:
        while not connection.poll(1.0):
            if os.getppid() != parent:
                return
        request = connection.recv()
        if request is None:  # of a save that has ended meanwhile
            connection.send(("cancelled", ""))
            continue
        if request == _READY:
            connection.send(("written", b""))
            continue
        target, direct, serial, num_bytes, items = request
        if serial != mapped:
            _, (descriptor,), _, _ = socket.recv_fds(descriptors, 1, 1)
            memory = mmap.mmap(descriptor, num_bytes)
            os.close(descriptor)
            mapped = serial
        values = [item if isinstance(item, bytes) else _tensor_of(item, memory) for item in items]
        write = partial(target.write, values, direct=direct, in_place=True)
        written = call_on_thread(partial(write, _Beats(connection, parent)), "trackbed writer")
        error = written.exception()
        if error is None:
            connection.send(("written", written.result().encode()))
        elif isinstance(error, _CancelledError):
            connection.send(("cancelled", ""))
        else:
            connection.send(("failed", f"{type(error).__name__}: {error}"))


def _tensor_of(item: Any, memory: mmap.mmap | None) -> torch.Tensor:
    dtype, shape, start = item
    kind: torch.dtype = getattr(torch, dtype)
    return torch.empty(shape, dtype=kind) if memory is None else view_of_memory(memory, start, kind, shape)


class _CancelledError(Exception):
    pass


class _Beats:
    """Sends signs of life while a file is written, and ends the work when the program has given it up."""

    def __init__(self, connection: Connection, parent: int) -> None:
        self._connection, self._parent = connection, parent
        self._last = 0.0

    def __call__(self) -> None:
        if self._connection.poll():
            self._connection.recv()  # None, or the end of the connection
            raise _CancelledError
        if time.monotonic() - self._last > _BEAT_SECONDS:
            self._last = time.monotonic()
            if os.getppid() != self._parent:
                os._exit(1)
            self._connection.send(("beat", ""))


def main() -> None:
    """Runs the process, whose arguments are two descriptors and the number of its parent."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    first, second, parent = map(int, sys.argv[1:4])
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(Connection(first), socket.socket(fileno=second), parent)
