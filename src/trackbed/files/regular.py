"""Regular files: opening and reading them, and stamps that tell a file from one that replaces it under the same name.

Opening a pipe waits for a writer, and reading a device may never end, so other files are refused.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import Final, NamedTuple

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


class Stamp(NamedTuple):
    """Inode, size and modification time of a file.

    The device is left out: hosts that share a file system number it differently.
    """

    inode: int
    """Signed 64-bit number, as arrays of stamps hold it."""
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """Returns the stamp of a file with this status."""
        return cls(signed(status.st_ino), status.st_size, status.st_mtime_ns)


def signed(inode: int) -> int:
    """Converts an inode's number from unsigned to signed 64 bits: some file systems assign numbers from `2**63` on.

    >>> signed(7), signed(2**64 - 7)
    (7, -7)
    """
    return inode - (1 << 64) if inode >> 63 else inode


def stamp_of(path: str | Path) -> Stamp | None:
    """Returns the stamp of the file at `path`, or None if there is none."""
    try:
        return Stamp.of(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove_unless_changed(path: str | Path, wanted: Stamp | None) -> bool:
    """Removes the file at `path` if it still has the stamp `wanted`. Returns True if it was removed.

    Raises:
        OSError: the file cannot be removed.
    """
    if wanted is None or stamp_of(path) != wanted:
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
        return True
    return False


def check_stamp(path: str | Path, expected: Stamp | None) -> None:
    """Checks that the file at `path` still has the stamp `expected`.

    Raises:
        FormatError: another file has replaced it, or it is gone.
    """
    found = stamp_of(path)
    if found != expected:
        what = "nothing" if found is None else "another one in its place"
        raise FormatError(
            f"{path}: the file must be the one that was opened, found {what}; start again with the files as they are"
        )
