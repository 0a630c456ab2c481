"""Whole or not at all: work is written to a partial file, which is renamed when it is complete.

A partial file is called `<final name>.<host>.<pid>.<start>.<serial>.partial`. Host, process number and the
time at which that process started say who writes it, so that the next writer on the same host can remove
what a killed one left, and nothing that is still being written.
"""

import errno
import itertools
import os
import re
import socket
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from pathlib import Path
from typing import Final

from trackbed.files.checksum import Checksum

__all__ = [
    "PartialFile",
    "Writer",
    "claim",
    "clear_dead_partials",
    "find_partials",
    "flush_to_disk",
    "is_partial_name",
    "new_partial",
    "partial_name",
    "publish",
    "write_new",
]

_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
_SERIAL: Final = itertools.count()
_WRITER: Final = re.compile(r"\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(?P<start>\d+)\.\d+\.partial$")


class Writer(Enum):
    """Who writes a partial file."""

    living = auto()
    dead = auto()
    elsewhere = auto()
    """A process of another host, or of another container: nothing can be said of it."""


@dataclass(frozen=True, slots=True)
class PartialFile:
    """A partial file that was found."""

    path: str
    final_name: str
    writer: Writer


def new_partial(final: Path, *, directory: Path | None = None) -> Path:
    """A fresh name, beside `final` or in `directory`, for the file that is to become `final`."""
    return (directory or final.parent) / partial_name(final.name)


def partial_name(final_name: str) -> str:
    """A fresh name for the file that is to become `final_name`."""
    return f"{final_name}.{_writer(os.getpid())}.{next(_SERIAL)}.partial"


def is_partial_name(name: str) -> bool:
    """True for the name of a file that is being written, or was when its writer ended.

    >>> is_partial_name("corpus.bin.host-4026531836.12.3456.0.partial"), is_partial_name("notes.partial")
    (True, False)
    """
    return _WRITER.search(name) is not None


def write_new(path: str | Path, *parts: bytes | memoryview) -> Checksum:
    """Write the new file `path` from parts of bytes. Returns its checksums.

    Raises:
        FileExistsError: there is a file of that name.
        OSError: it cannot be written, or the disk is full.
    """
    checksum = Checksum()
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for view in views:
            checksum.update(view)
        while views:
            written = os.writev(descriptor, views)
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]
    except OSError as error:
        error.filename = str(path)  # a full disk does not say which
        raise
    finally:
        os.close(descriptor)
    return checksum


def publish(partial: str | Path, final: str | Path) -> None:
    """Let the complete file `partial` appear as `final`; whoever has the old file open keeps it."""
    os.replace(partial, final)  # noqa: PTH105  also for names of thousands of files, where pathlib takes as long again


def claim(partial: str, final: str) -> bool:
    """Let the complete file `partial` appear as `final` unless there is such a file. Returns whether it did.

    Of several that claim one name, on any host, one wins; but for file systems without hard links, where two that come
    at the very same moment may both be told that they did.
    """
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
    os.unlink(partial)  # noqa: PTH108  see publish
    return True


def flush_to_disk(path: Path) -> None:
    """Return once the bytes of the file or the entries of the folder `path` are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_dead_partials(directory: Path, *, final_name: str = "") -> list[Path]:
    """Remove the partial files of `final_name` (of all names if empty) whose writer died on this host."""
    removed = []
    for found in find_partials(directory, final_name=final_name):
        if found.writer is Writer.dead:
            path = Path(found.path)
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def find_partials(directory: Path, *, final_name: str = "") -> list[PartialFile]:
    """The partial files of `final_name` (of all names if empty) in a folder, by name.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for name in sorted(os.listdir(directory)):  # noqa: PTH208  pathlib takes ten times as long
        writer = _WRITER.search(name)
        if writer is None or (final_name and name[: writer.start()] != final_name):
            continue
        state = Writer.elsewhere
        if writer["host"] == _host():
            is_alive = _start_of(int(writer["pid"])) == int(writer["start"])
            state = Writer.living if is_alive else Writer.dead
        found.append(PartialFile(f"{directory}/{name}", name[: writer.start()], state))
    return found


@lru_cache(maxsize=1)
def _writer(pid: int) -> str:
    """What says who this process is; the number is there so that a forked one asks again."""
    return f"{_host()}.{pid}.{_start_of(pid)}"


def _host() -> str:
    """Name of the host and of its set of process numbers: containers may share a host's name and a folder."""
    name = socket.gethostname().replace(".", "-").replace("/", "-") or "localhost"
    try:
        return f"{name}-{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    except OSError:
        return name


def _start_of(pid: int) -> int:
    """When process `pid` started, in clock ticks since the machine did; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # A zombie has ended its work: only its parent has not looked yet.
    return 0 if fields[0] in "ZX" else int(fields[19])
