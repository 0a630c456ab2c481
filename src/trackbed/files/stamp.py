"""Stamps that tell a file from another one that replaces it under the same name."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from trackbed.errors import FormatError


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


def check_stamp(path: str | Path, wanted: Stamp | None) -> None:
    """Checks that the file at `path` still has the stamp `wanted`.

    Raises:
        FormatError: another file has replaced it, or it is gone.
    """
    found = stamp_of(path)
    if found != wanted:
        what = "nothing" if found is None else "another one in its place"
        raise FormatError(
            f"{path}: the file must be the one that was opened, found {what}; start again with the files as they are"
        )
