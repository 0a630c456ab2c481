"""Writing to the disk while the work goes on, so that the flush at its end finds little left to do."""

import contextlib
import ctypes
import mmap
import os
from typing import Final

__all__ = ["Writeback", "write_out"]

_STEP_BYTES: Final = 4 << 20
_BEHIND_BYTES: Final = 8 << 20
"""The end of the file that stays in memory: enough for the disk to be at work all the time."""

_START: Final = 2  # SYNC_FILE_RANGE_WRITE: begin, and do not wait
_WAIT: Final = 7  # and wait, for what was begun before too


class Writeback:
    """Has the system write a file that grows, and give its memory back. Does nothing where it cannot (only Linux can).

    So a file of any size takes some MiB. What the system does for each page of fresh memory takes longer than the
    copy into it.

    Args:
        descriptor: the open file.
        size_bytes: what it has already.
    """

    def __init__(self, descriptor: int, size_bytes: int = 0) -> None:
        self._descriptor = descriptor
        self._started = self._given_back = size_bytes

    def grown(self, size_bytes: int) -> None:
        """Take note that the file holds `size_bytes` bytes now."""
        if size_bytes - self._started < _STEP_BYTES or _sync_file_range is None:
            return
        # Hints: what goes wrong with them, the flush at the end will tell.
        _sync_file_range(self._descriptor, self._started, size_bytes - self._started, _START)
        self._started = size_bytes
        behind = size_bytes - _BEHIND_BYTES - self._given_back
        if behind > 0:
            _sync_file_range(self._descriptor, self._given_back, behind, _WAIT)
            # A page that is only partly in the range stays, and is in the next one.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, self._given_back, behind, os.POSIX_FADV_DONTNEED)
            self._given_back = (self._given_back + behind) // mmap.PAGESIZE * mmap.PAGESIZE


def write_out(descriptor: int, start: int, size_bytes: int) -> None:
    """Write a range of a file out of memory, and wait for it. Its safety on the disk takes a flush besides.

    Raises:
        OSError: it cannot be written.
    """
    if _sync_file_range is not None and _sync_file_range(descriptor, start, size_bytes, _WAIT) == 0:
        return
    os.fsync(descriptor)  # also where the call is refused; what is really wrong, this says too


_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
