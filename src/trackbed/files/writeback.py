"""Writing to the disk while the work goes on, so that the flush at its end finds little left to do."""

import ctypes
import os
from typing import Final

__all__ = ["Writeback", "write_out"]

_STEP_BYTES: Final = 8 << 20
_START: Final = 2  # SYNC_FILE_RANGE_WRITE: begin, and do not wait
_WAIT: Final = 7  # and wait, for what was begun before too


class Writeback:
    """Has the system begin to write a file that grows, every 8 MiB. Does nothing where it cannot (only Linux can).

    Args:
        descriptor: the open file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._started = 0

    def grown(self, size_bytes: int) -> None:
        """Take note that the file holds `size_bytes` bytes now."""
        if size_bytes - self._started >= _STEP_BYTES and _sync_file_range is not None:
            _sync_file_range(self._descriptor, self._started, size_bytes - self._started, _START)
            self._started = size_bytes  # a hint: what goes wrong with it, the flush at the end will tell


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
