"""What tells a file from another that takes its name."""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from trackbed.errors import FormatError

__all__ = ["Stamp", "check_stamp", "remove_unless_changed", "signed", "stamp_of"]


class Stamp(NamedTuple):
    """A file, as it was when it was looked at.

    Without its device: hosts that share a file system number it each in their own way.
    """

    inode: int
    """As 64 bits with a sign, which is how arrays of stamps hold it."""
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """The stamp of a file whose status is known."""
        return cls(signed(status.st_ino), status.st_size, status.st_mtime_ns)


def signed(inode: int) -> int:
    """The 64 bits of an inode's number as one with a sign: some file systems give numbers from `2**63` on.

    >>> signed(7), signed(2**64 - 7)
    (7, -7)
    """
    return inode - (1 << 64) if inode >> 63 else inode


def stamp_of(path: str | Path) -> Stamp | None:
    """The stamp of the file at `path`, or None where there is none."""
    try:
        return Stamp.of(os.stat(path))  # noqa: PTH116  thousands of pairs are opened: pathlib takes as long again
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove_unless_changed(path: str | Path, wanted: Stamp | None) -> bool:
    """Remove the file at `path` if it is still the one that was looked at. Returns whether it was removed.

    Raises:
        OSError: it cannot be removed.
    """
    if wanted is None or stamp_of(path) != wanted:
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108  thousands of files are removed
        return True
    return False


def check_stamp(path: str | Path, wanted: Stamp | None) -> None:
    """Refuse a file that is not the one that was looked at before.

    Raises:
        FormatError: another file has taken its place, or none is there.
    """
    found = stamp_of(path)
    if found != wanted:
        what = "nothing" if found is None else "another one in its place"
        msg = f"{path}: the file must be the one that was opened, found {what}; start again with the files as they are"
        raise FormatError(msg)
