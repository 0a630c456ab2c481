"""Typed doors to kernels that treat many files in one call.

Thousands of small files are written at a start. Each call of the system that Python makes takes as long again, and
gives other threads the interpreter, which is then waited for.

Shapes: N files.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.poll import Poll, current_poll

__all__ = ["file_stamps", "write_files"]

Part = bytes | memoryview

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_files(files: Mapping[str, Sequence[Part]], *, poll: Poll = None) -> None:
    """Make new files of these parts, by path.

    Args:
        files: of each path, contiguous bytes that follow one another.
        poll: looks in while it runs.

    Raises:
        OSError: one cannot be written, for instance as there is a file of that name; those before it are there.
        ArgumentError: a path is empty or holds a zero byte.
    """
    parts = [part for parts in files.values() for part in parts]
    counts = np.array([len(parts) for parts in files.values()], dtype=np.int64)
    paths = list(files)
    for path in paths:
        sys.audit("open", path, None, _NEW_FILE)
    error, place = _native.write_files(_joined(paths), parts, counts, current_poll(poll))
    if error:
        raise OSError(error, os.strerror(error), paths[place])


def file_stamps(folder: str, names: Sequence[str], *, num_threads: int = 1, poll: Poll = None) -> npt.NDArray[np.int64]:
    """`[N, 3]` inode, size in bytes, and nanoseconds since 1970 at which it was last written, of each file.

    Thrice -1 for what is not there or cannot be looked at.

    Args:
        folder: what relative names begin from.
        names: `[N]` names of files.
        num_threads: at least 1.
        poll: looks in while it runs, with the number of files that were looked at.

    Raises:
        ArgumentError: a name is empty or holds a zero byte.
    """
    stamps = np.empty((len(names), 3), dtype=np.int64)
    _native.file_stamps(
        os.fsencode(folder), _joined(names), stamps.reshape(-1), max(num_threads, 1), current_poll(poll)
    )
    return stamps


def _joined(names: Sequence[str]) -> bytes:
    """Each name, ended by a zero byte."""
    joined = os.fsencode("".join(f"{name}\0" for name in names))
    if joined.count(0) != len(names) or joined.startswith(b"\0") or b"\0\0" in joined:
        msg = f"names of files must not be empty and hold no zero byte, found one of {len(names)} that does"
        raise ArgumentError(msg)
    return joined
