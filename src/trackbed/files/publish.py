"""Whole or not at all: work is written to a partial file, which is renamed when it is complete.

A partial file is called `<final name>.<host>.<pid>.<start>.<serial>.partial`. Host, process number and the
time at which that process started say who writes it, so that the next writer on the same host can remove
what a killed one left, and nothing that is still being written.
"""

import itertools
import os
import re
import socket
from functools import lru_cache
from pathlib import Path
from typing import Final

__all__ = ["clear_dead_partials", "flush_to_disk", "new_partial", "publish"]

_SERIAL: Final = itertools.count()
_WRITER: Final = re.compile(r"\.(?P<host>[^.]+)\.(?P<pid>\d+)\.(?P<start>\d+)\.\d+\.partial$")


def new_partial(final: Path, *, directory: Path | None = None) -> Path:
    """A fresh name, beside `final` or in `directory`, for the file that is to become `final`."""
    name = f"{final.name}.{_writer(os.getpid())}.{next(_SERIAL)}.partial"
    return (directory or final.parent) / name


def publish(partial: Path, final: Path) -> None:
    """Let the complete file `partial` appear as `final`; whoever has the old file open keeps it."""
    partial.replace(final)


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
    for name in sorted(os.listdir(directory)):  # noqa: PTH208  pathlib takes ten times as long
        writer = _WRITER.search(name)
        if writer is None or (final_name and name[: writer.start()] != final_name):
            continue
        path = directory / name
        pid, start = int(writer["pid"]), int(writer["start"])
        if writer["host"] == _host() and _start_of(pid) != start:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


@lru_cache(maxsize=1)
def _writer(pid: int) -> str:
    """What says who this process is; the number is there so that a forked one asks again."""
    return f"{_host()}.{pid}.{_start_of(pid)}"


def _host() -> str:
    return socket.gethostname().replace(".", "-").replace("/", "-") or "localhost"


def _start_of(pid: int) -> int:
    """When process `pid` started, in clock ticks since the machine did; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    # A zombie has ended its work: only its parent has not looked yet.
    return 0 if fields[0] in "ZX" else int(fields[19])
