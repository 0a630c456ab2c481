"""Flush of a whole file system to its disk, in one call."""

import ctypes
import errno
import os

__all__ = ["flush_file_system"]

_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


def flush_file_system(folder: str) -> None:
    """Returns once all data written to the file system of `folder` is on the disk. Releases the GIL meanwhile.

    Raises:
        OSError: the folder cannot be opened, a write has failed since the folder was opened, or the system does not
            have the call `syncfs`.
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
