"""Files in memory, without a descriptor.

Python's own maps keep the descriptor of their file until they are gone (before Python 3.13, which can be told not to):
a job that reads thousands of datasets would run out of them.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.files.resource_limit import MAPS

__all__ = ["let_go", "map_readonly", "read_ahead"]

_READ_BYTES: Final = 4096
"""A file of one page is read: a map takes as much memory, and is one of those that the system gives a process."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PROT_READ: Final = 1
_MAP_SHARED: Final = 1
_WILL_NEED: Final = 3
_DONT_NEED: Final = 4
_AHEAD_BYTES: Final = 32 << 20
_STRIDE_BYTES: Final = 128 << 10
"""Linux takes no notice of what goes beyond the largest request of the device."""
_FAILED: Final = ctypes.c_void_p(-1).value

_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,  # off_t, on every system that is 64 bits wide
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_readonly(descriptor: int, size: int | None = None) -> npt.NDArray[np.uint8]:
    """The bytes of an open file, mapped read-only. The map lives as long as any array cut from it.

    A file of up to 4 KiB is read into memory instead. Where there are many maps, those used least recently are released
    first (see `ResourceLimit`).

    Args:
        descriptor: of the file; may be closed afterwards.
        size: bytes of the file, if they are known.

    Raises:
        OSError: the file cannot be mapped, or this process has as many maps as it may.
    """
    size = os.fstat(descriptor).st_size if size is None else size
    if size <= _READ_BYTES:
        return np.frombuffer(os.pread(descriptor, size, 0), dtype=np.uint8)
    MAPS.make_room()
    address = _LIBC.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    pages: ctypes.Array[Any] = (ctypes.c_ubyte * size).from_address(address)
    MAPS.opened(address)
    # Whoever holds an array holds these pages. At the end of the process the system unmaps them.
    weakref.finalize(pages, _unmap, address, size).atexit = False
    return np.frombuffer(memoryview(pages).toreadonly(), dtype=np.uint8)


def _unmap(address: int, size: int) -> None:
    MAPS.closed(address)
    _LIBC.munmap(address, size)


def read_ahead(array: npt.NDArray[Any]) -> None:
    """Have the system begin to read what an array holds of its file, up to 32 MiB, where that is not in memory.

    Who goes through a map waits for each page that is missing, or for a few of them; so he waits for all at once.

    Args:
        array: cut from what `map_readonly` returned.
    """
    first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    stop = array.ctypes.data + min(array.nbytes, _AHEAD_BYTES)
    for start in range(first, stop, _STRIDE_BYTES):
        _LIBC.madvise(start, min(_STRIDE_BYTES, stop - start), _WILL_NEED)  # a hint, as below


def let_go(array: npt.NDArray[Any]) -> None:
    """Give back the memory of an array that `map_readonly` has mapped, until it is read again.

    Who reads a large file once, from its beginning to its end, so takes no more memory than the pieces it looks at.

    Args:
        array: cut from what `map_readonly` returned; any other array of several pages would lose its content.
    """
    if array.nbytes <= _READ_BYTES:
        return
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - first
    if size > 0:
        _LIBC.madvise(first, size, _DONT_NEED)  # a hint: where it is not taken, the pages stay
