"""Opening and reading of regular files only: opening a pipe waits for a writer, and reading a device may never end."""

import os
import stat
from pathlib import Path
from typing import Final

from trackbed.errors import FormatError

_MAX_BYTES: Final = 1 << 30
"""Size limit of a file that is read whole; notes, manifests and seals have a millionth of it."""


def open_regular(path: str | Path) -> tuple[int, int]:
    """Opens a regular file for reading. Returns its descriptor, and its size in bytes.

    Raises:
        FormatError: `path` is a folder, a pipe, a device or a socket.
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise FormatError(f"{path}: must be a regular file, found {kind_of(status.st_mode)}")
    return descriptor, status.st_size


def read_regular(path: str | Path) -> bytes:
    """Reads a regular file of up to 1 GiB.

    Raises:
        FormatError: `path` is no regular file, or the file is larger.
        OSError: the file cannot be read.
    """
    descriptor, size = open_regular(path)
    try:
        if size > _MAX_BYTES:
            raise FormatError(f"{path}: must have {_MAX_BYTES} bytes at most, found {size}")
        raw = os.read(descriptor, size + 1)
        while len(raw) < size and (more := os.read(descriptor, size - len(raw))):
            raw += more
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
    return raw


def kind_of(mode: int) -> str:
    """Name of the kind of a file that is no regular one, from its mode."""
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
