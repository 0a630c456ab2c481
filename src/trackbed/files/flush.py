"""Flushing everything that was written to a file system to its disk, in one call."""

import ctypes
import errno
import os

__all__ = ["flush_file_system"]

_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


def flush_file_system(folder: str) -> None:
    """Return once all that was written to the file system of `folder` is on the disk. Other threads run meanwhile.

    Raises:
        OSError: the folder cannot be opened, something could not be written since the folder was opened, or the system
            has no such call.
    """
    if _syncfs is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), folder)
    finally:
        os.close(descriptor)
