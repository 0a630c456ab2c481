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

__all__ = ["let_go", "map_readonly"]

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PROT_READ: Final = 1
_MAP_SHARED: Final = 1
_DONT_NEED: Final = 4
_FAILED: Final = ctypes.c_void_p(-1).value

_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,  # off_t, on every system that is 64 bits wide
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_readonly(descriptor: int) -> npt.NDArray[np.uint8]:
    """The bytes of an open file, mapped read-only. The map lives as long as any array cut from it.

    Args:
        descriptor: of the file; may be closed afterwards.

    Raises:
        OSError: the file cannot be mapped, or this process has as many maps as it may.
    """
    size = os.fstat(descriptor).st_size
    if size == 0:
        return np.empty(0, dtype=np.uint8)
    address = _LIBC.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    pages: ctypes.Array[Any] = (ctypes.c_ubyte * size).from_address(address)
    # Whoever holds an array holds these pages. At the end of the process the system unmaps them.
    weakref.finalize(pages, _LIBC.munmap, address, size).atexit = False
    return np.frombuffer(memoryview(pages).toreadonly(), dtype=np.uint8)


def let_go(array: npt.NDArray[Any]) -> None:
    """Give back the memory of an array that `map_readonly` has mapped, until it is read again.

    Who reads a large file once, from its beginning to its end, so takes no more memory than the pieces it looks at.

    Args:
        array: cut from what `map_readonly` returned; any other array would lose its content.
    """
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - first
    if size > 0:
        _LIBC.madvise(first, size, _DONT_NEED)  # a hint: where it is not taken, the pages stay
