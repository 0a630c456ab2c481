"""Writing to the disk while the work goes on, so that the flush at its end finds little left to do."""

import ctypes
from typing import Final

__all__ = ["Writeback"]

_STEP_BYTES: Final = 8 << 20
_START: Final = 2  # SYNC_FILE_RANGE_WRITE: begin, and do not wait


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


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
