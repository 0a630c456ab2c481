"""Writeback to the disk while a file is still growing, so that the flush at the end has little left to write."""

import contextlib
import ctypes
import mmap
import os
from typing import Final

__all__ = ["Writeback", "write_out"]

_STEP_BYTES: Final = 4 << 20
_BEHIND_BYTES: Final = 8 << 20
"""Bytes at the end of the file that stay in memory: enough to keep the disk busy all the time."""

_START: Final = 2  # SYNC_FILE_RANGE_WRITE: start writing, and do not wait
_WAIT: Final = 7  # write and wait, also for writes that were started before


class Writeback:
    """Writes a growing file to the disk and drops its pages from memory. Does nothing on systems other than Linux.

    So a file of any size takes a few MiB of the page cache. Allocating a fresh page takes the system longer than the
    copy into it.

    Args:
        descriptor: descriptor of the open file.
        size_bytes: size of the file so far.
    """

    def __init__(self, descriptor: int, size_bytes: int = 0) -> None:
        self._descriptor = descriptor
        self._started = self._dropped = size_bytes

    def grown(self, size_bytes: int) -> None:
        """Records that the file has `size_bytes` bytes now."""
        if size_bytes - self._started < _STEP_BYTES or _sync_file_range is None:
            return
        # Hints: the flush at the end reports write errors.
        _sync_file_range(self._descriptor, self._started, size_bytes - self._started, _START)
        self._started = size_bytes
        behind = size_bytes - _BEHIND_BYTES - self._dropped
        if behind > 0:
            _sync_file_range(self._descriptor, self._dropped, behind, _WAIT)
            # A page that is only partly in the range stays in memory, and is part of the next range.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, self._dropped, behind, os.POSIX_FADV_DONTNEED)
            self._dropped = (self._dropped + behind) // mmap.PAGESIZE * mmap.PAGESIZE


def write_out(descriptor: int, start: int, size_bytes: int) -> None:
    """Writes a range of a file to the disk, and waits for it. Durability takes a flush besides.

    Raises:
        OSError: the range cannot be written.
    """
    if _sync_file_range is not None and _sync_file_range(descriptor, start, size_bytes, _WAIT) == 0:
        return
    os.fsync(descriptor)  # also if the call is refused; a write error is raised here too


_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
