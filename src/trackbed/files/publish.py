"""Atomic publication of files: data is written to a partial file, which is renamed once it is complete.

A partial file is called `<final name>.<host>.<pid>.<start>.<serial>.partial`. Host, process number and start time of
that process identify its writer, so the next writer on the same host can remove the files of a killed process, and
none that is still being written. A final name that is too long for this is cut, and ends in a digest. Partial folders
(`trackbed.files.publish_folder`) have the same names.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
import socket
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from pathlib import Path
from typing import Final

from trackbed.files.checksum import Checksum

_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
_MOST_NAME_BYTES: Final = 255  # of every file system of Linux but few
_MOST_CHAR_BYTES: Final = 4
_DIGEST_CHARS: Final = 16
_SERIAL: Final = itertools.count()
_WRITER: Final = re.compile(r"\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(?P<start>\d+)\.\d+\.partial$")


class Writer(Enum):
    """State of the process that writes a partial file."""

    living = auto()
    dead = auto()
    elsewhere = auto()
    """A process on another host, or in another container: its state is unknown."""


@dataclass(frozen=True, slots=True)
class PartialFile:
    """A partial file or folder."""

    path: str
    final_name: str
    """Name that the file is to get, cut if it is very long."""
    writer: Writer


def new_partial(final: Path, *, directory: Path | None = None) -> Path:
    """Returns a new unique path, beside `final` or in `directory`, of a file or folder to be published as `final`."""
    return (directory or final.parent) / partial_name(final.name)


def partial_name(final_name: str) -> str:
    """Returns a new unique name for a file to be published as `final_name`."""
    end = f".{_writer(os.getpid())}.{next(_SERIAL)}.partial"
    return f"{_shortened(final_name, end)}{end}"


def _shortened(final_name: str, end: str) -> str:
    """Returns a final name as it stands before the end of a partial name."""
    room = _MOST_NAME_BYTES - len(os.fsencode(end))
    if len(final_name) * _MOST_CHAR_BYTES <= room or len(raw := os.fsencode(final_name)) <= room:
        return final_name
    digest = f"-{hashlib.sha256(raw).hexdigest()[:_DIGEST_CHARS]}"
    return raw[: room - len(digest)].decode(errors="ignore") + digest


def is_partial_name(name: str) -> bool:
    """True for the name of a partial file.

    >>> is_partial_name("corpus.bin.host-4026531836.12.3456.0.partial"), is_partial_name("notes.partial")
    (True, False)
    """
    return _WRITER.search(name) is not None


def write_new(path: str | Path, *parts: bytes | memoryview) -> Checksum:
    """Creates the file `path` with the concatenation of `parts`. Returns its checksums.

    Raises:
        FileExistsError: the file exists.
        OSError: the file cannot be written, or the disk is full.
    """
    checksum = Checksum()
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for view in views:
            checksum.update(view)
        # A full disk or a signal may end a write early. The next one writes the rest, or raises the error.
        while views:
            written = os.writev(descriptor, views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]
    except OSError as error:
        error.filename = str(path)  # the error of a full disk has no file name
        raise
    finally:
        os.close(descriptor)
    return checksum


def publish(partial: str | Path, final: str | Path) -> None:
    """Renames the complete file `partial` to `final`; processes that have an old file open keep it."""
    os.replace(partial, final)


def claim(partial: str, final: str) -> bool:
    """Renames the complete file `partial` to `final` unless `final` exists. Returns True if it did.

    Of several processes that claim one name, on any host, one succeeds. The exception is a file system without hard
    links, where two processes that claim it at the same moment may both get True.
    """
    # A link fails where the name exists, also if another host has just made it; a rename would replace the other file.
    # To look first and rename then, as below, leaves a moment in which two processes find the name free.
    try:
        os.link(partial, final)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(final):
            return False
        publish(partial, final)
        return True
    # Killed before this call, a process leaves two names of one file. The partial name goes with those of dead writers.
    os.unlink(partial)
    return True


def flush_to_disk(path: Path) -> None:
    """Returns once the bytes of the file or the entries of the folder `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_dead_partials(directory: Path, *, final_name: str = "") -> list[Path]:
    """Removes the partial files and folders of `final_name` (of all names if empty) whose writer died on this host.

    Returns:
        Their paths, sorted by name.

    Raises:
        OSError: `directory` cannot be read, or a file cannot be removed.
    """
    removed = []
    for found in find_partials(directory, final_name=final_name):
        if found.writer is Writer.dead:
            path = Path(found.path)
            remove_partial(path)
            removed.append(path)
    return removed


def remove_partial(path: Path) -> None:
    """Removes a partial file, or a partial folder with its content; other processes may be doing the same.

    Raises:
        OSError: a file cannot be removed.
    """
    while True:
        try:
            path.unlink()
        except FileNotFoundError:
            return
        except IsADirectoryError:
            with contextlib.suppress(FileNotFoundError):  # another process has removed a file first
                shutil.rmtree(path)


def own_writer() -> str:
    """Returns the identifier of this process, for `state_of_writer`."""
    return _writer(os.getpid())


def state_of_writer(writer: str) -> Writer:
    """Returns the state of a process from its identifier: host, number and start."""
    host, _, rest = writer.partition(".")
    pid, _, start = rest.partition(".")
    # On another host, or in another container, the number says nothing: a writer there may be in the middle of its
    # file.
    if host != _host() or not (pid.isdigit() and start.isdigit()):
        return Writer.elsewhere
    # The number of a dead writer may be another process's by now. Its start time tells them apart; otherwise the files
    # of a killed job would stay as long as that process lives.
    return Writer.living if _start_of(int(pid)) == int(start) else Writer.dead


def find_partials(directory: Path, *, final_name: str = "") -> list[PartialFile]:
    """Returns the partial files and folders of `final_name` (of all names if empty) in a folder, sorted by name.

    Raises:
        OSError: the folder cannot be read.
    """
    partials = []
    for name in sorted(os.listdir(directory)):
        writer = _WRITER.search(name)
        if writer is None:
            continue
        begin = name[: writer.start()]
        if final_name and begin not in (final_name, _shortened(final_name, writer[0])):
            continue
        state = state_of_writer(f"{writer['host']}.{writer['pid']}.{writer['start']}")
        partials.append(PartialFile(f"{directory}/{name}", begin, state))
    return partials


@lru_cache(maxsize=1)
def _writer(pid: int) -> str:
    """Identifier of this process; `pid` is an argument so that a forked process gets its own."""
    return f"{_host()}.{pid}.{_start_of(pid)}"


def _host() -> str:
    """Name of the host and of its PID namespace: containers may share a host name and a folder."""
    name = socket.gethostname().replace(".", "-").replace("/", "-") or "localhost"
    try:
        return f"{name}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return name


def _start_of(pid: int) -> int:
    """Start time of process `pid`, in clock ticks since boot; 0 if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # A zombie has ended; only its parent has yet to wait for it.
    return 0 if fields[0] in "ZX" else int(fields[19])
