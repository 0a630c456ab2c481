"""Read-only memory maps that keep no file descriptor open, and the files that processes of this host have mapped.

Python's own maps keep a descriptor of their file as long as they live (from Python 3.13 on, `trackfd=False` avoids it):
a job that reads thousands of datasets would run out of descriptors.
"""

import ctypes
import errno
import mmap
import os
import re
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.files.regular import open_regular, signed
from trackbed.files.resource_limit import MAPS

_READ_BYTES: Final = 4096
"""A file of one page is read instead: a map takes as much memory, and the number of maps of a process is limited."""

_REFUSALS: Final = (errno.EPERM, errno.ENOMEM, errno.EAGAIN, errno.ENODEV)
_READ: Final[dict[int, int]] = {}
"""Sizes of files that were read because maps of them were refused, by address."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PROT_READ: Final = 1
_MAP_SHARED: Final = 1
_RANDOM: Final = 1
_WILL_NEED: Final = 3
_DONT_NEED: Final = 4
_AHEAD_BYTES: Final = 32 << 20
_STRIDE_BYTES: Final = 128 << 10
"""Linux ignores the part of a request beyond the largest request of the device."""
_FAILED: Final = ctypes.c_void_p(-1).value

_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_int64,  # off_t on every 64-bit system
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_readonly(descriptor: int, size: int | None = None, *, may_read: bool = True) -> npt.NDArray[np.uint8]:
    """Maps an open file read-only. Returns its bytes; the map lives as long as any view of them.

    A file of up to 4 KiB is read into memory instead. If there are many maps, the least recently used ones are released
    first (see `ResourceLimit`); so they are where the system refuses a map. Where it refuses all, the file is read into
    memory.

    Args:
        descriptor: descriptor of the file; may be closed afterwards.
        size: size of the file in bytes, if known.
        may_read: False for an error instead, for files that are too large to be read.

    Raises:
        MapRefusedError: the system refuses, and `may_read` is False.
        OSError: the file cannot be mapped or read.
    """
    size = os.fstat(descriptor).st_size if size is None else size
    if size <= _READ_BYTES:
        return np.frombuffer(os.pread(descriptor, size, 0), dtype=np.uint8)
    MAPS.make_room()
    try:
        return _map(descriptor, size)
    except MapRefusedError as refusal:
        if MAPS.refused(str(refusal.strerror)):
            try:
                return _map(descriptor, size)
            except MapRefusedError:
                MAPS.refused_again(str(refusal.strerror))
        if not may_read:
            raise
        return _read(descriptor, size)


class MapRefusedError(OSError):
    """The system refuses a memory map: too many, too large, or none on this file system."""


def _read(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    """Reads a whole file, into memory that `drop_pages` leaves as it is."""
    content = np.empty(size, dtype=np.uint8)
    done = 0
    while done < size:
        got = os.preadv(descriptor, [content.data[done:]], done)
        if got == 0:
            raise OSError(errno.EIO, f"must have {size} bytes, but ends after {done}")
        done += got
    _READ[content.ctypes.data] = size
    weakref.finalize(content, _READ.pop, content.ctypes.data, None).atexit = False
    content.flags.writeable = False
    return content


def _map(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    address = _LIBC.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise (MapRefusedError if number in _REFUSALS else OSError)(number, os.strerror(number))
    pages: ctypes.Array[Any] = (ctypes.c_ubyte * size).from_address(address)
    MAPS.opened(address)
    # Every array cut from it keeps the map alive. At the end of the process the system unmaps it.
    weakref.finalize(pages, _unmap, address, size).atexit = False
    return np.frombuffer(memoryview(pages).toreadonly(), dtype=np.uint8)


def count_maps(path: str | Path, most: int) -> tuple[int, str]:
    """Maps a file again and again. Returns the number of maps that the system allows, and why it refuses a further one.

    Args:
        path: path of the file, which has at least 1 byte.
        most: number of maps that is enough; the reason is then empty.
    """
    descriptor, size = open_regular(path)
    maps: list[npt.NDArray[np.uint8]] = []
    try:
        while len(maps) < most:
            maps.append(_map(descriptor, size))
    except MapRefusedError as refusal:
        return len(maps), str(refusal.strerror)
    finally:
        os.close(descriptor)
    return len(maps), ""


def _unmap(address: int, size: int) -> None:
    MAPS.closed(address)
    _LIBC.munmap(address, size)


def read_ahead(array: npt.NDArray[Any]) -> None:
    """Starts reading the part of a file that `array` maps, up to 32 MiB, into memory. Returns at once.

    Without it, iterating over the map waits for each missing page, or for a few of them, in turn.

    Args:
        array: view of an array from `map_readonly`.
    """
    first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    stop = array.ctypes.data + min(array.nbytes, _AHEAD_BYTES)
    for start in range(first, stop, _STRIDE_BYTES):
        _LIBC.madvise(start, min(_STRIDE_BYTES, stop - start), _WILL_NEED)  # a hint, as below


def expect_random_reads(array: npt.NDArray[Any]) -> None:
    """Tells the system that a mapped file is read in small pieces anywhere, so that it reads the pages of those alone.

    Otherwise each page that is not in memory is read with up to some MiB around it.

    Args:
        array: bytes of a whole file from `map_readonly`; it may be another array too, which stays as it is.
    """
    if array.nbytes > _READ_BYTES and not (_READ and _is_read(array.ctypes.data)):
        first = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        _LIBC.madvise(first, array.ctypes.data + array.nbytes - first, _RANDOM)  # a hint, as below


def drop_pages(array: npt.NDArray[Any]) -> None:
    """Drops the pages of a mapped array from the memory of this process; they are read again on the next access.

    A pass over a large file that drops each piece after use takes only the memory of one piece.

    Args:
        array: view of an array from `map_readonly`; any other array of several pages would lose its content.
    """
    if array.nbytes <= _READ_BYTES or (_READ and _is_read(array.ctypes.data)):
        return
    first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - first
    if size > 0:
        _LIBC.madvise(first, size, _DONT_NEED)  # a hint: if it fails, the pages stay


def _is_read(address: int) -> bool:
    """True if memory at an address is no map, but what `_read` has read."""
    return any(start <= address < start + size for start, size in list(_READ.items()))


_LINE: Final = re.compile(
    rb"^[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ [0-9a-f]+:[0-9a-f]+ (?P<inode>\d+) +/.*?(?P<name>[^/\n]+)$", re.MULTILINE
)


def mapped_files(name_ends: tuple[str, ...]) -> frozenset[tuple[int, str]]:
    """Returns inode and name of the mapped files whose name ends with one of `name_ends`.

    Covers the processes that this user may inspect. Paths and devices are less reliable: a process in a container may
    see a file under another path, and some file systems report another device for a mapped file.
    """
    mapped: set[tuple[int, str]] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        for line in _LINE.finditer(maps):
            name = line["name"].decode(errors="surrogateescape")
            if name.endswith(name_ends):
                mapped.add((signed(int(line["inode"])), name))
    return frozenset(mapped)
