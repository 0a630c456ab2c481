"""Bringing written data to the disk: files that are still being written or filled, and whole file systems.

Where writeback starts early, the flush at the end has little left to write.
"""

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final, Generic, TypeVar

from trackbed.files.checksum import CHUNK_BYTES, Checksum

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
    """Writes a range of a file to the disk, and waits for it. Durability takes a flush besides."""
    if _sync_file_range is not None and _sync_file_range(descriptor, start, size_bytes, _WAIT) == 0:
        return
    os.fsync(descriptor)  # also if the call is refused; a write error is raised here too


_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


_POLL_SECONDS: Final = 0.02


class BackgroundWriteback:
    """Writes a mapped file out on a thread, while the caller fills it from its beginning to its end.

    The thread follows the caller: it computes the checksum of each final chunk, writes the chunk to the disk, and drops
    its pages from memory. So a file of any size takes a few hundred MiB of memory, and filling it touches no more fresh
    pages than that; faulting a fresh page in takes longer than computing its part of an index.

    Args:
        path: the file, which keeps that name until `finish` or `stop` returns.
        mapped: map of the whole file.
    """

    def __init__(self, path: str, mapped: mmap.mmap) -> None:
        self._path = path
        self._mapped = mapped
        self._final_bytes = 0
        self._ended = Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trackbed-writeback")
        self._checksum: Future[Checksum] = self._pool.submit(self._follow)

    def filled(self, size_bytes: int) -> None:
        """Declares the first `size_bytes` bytes final."""
        self._final_bytes = max(self._final_bytes, size_bytes)

    def finish(self) -> Checksum:
        """Declares the whole file final, waits until it is written, and returns its checksums.

        Raises:
            OSError: the file cannot be written.
        """
        self.filled(len(self._mapped))
        try:
            return self._checksum.result()
        finally:
            self.stop()

    def stop(self) -> None:
        """Stops the thread, even before the file is complete."""
        self._ended.set()
        self._pool.shutdown()

    def _follow(self) -> Checksum:
        checksum, size = Checksum(), len(self._mapped)
        with memoryview(self._mapped) as data, Path(self._path).open("rb", buffering=0) as file:
            while checksum.size_bytes < size and not self._ended.is_set():
                start = checksum.size_bytes
                stop = min(start + CHUNK_BYTES, size)
                if self._final_bytes < stop:
                    self._ended.wait(_POLL_SECONDS)
                    continue
                checksum.update(data[start:stop])
                write_out(file.fileno(), start, stop - start)
                if hasattr(mmap, "MADV_DONTNEED") and hasattr(os, "posix_fadvise"):
                    self._mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)
                    os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)
        return checksum


logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")

_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


def flush_file_system(folder: str) -> None:
    """Returns once all data written to the file system of `folder` is on the disk. Releases the GIL meanwhile."""
    if _syncfs is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), folder)
    finally:
        os.close(descriptor)


class BackgroundFlush(Generic[_Item]):
    """Thread that flushes the file systems of folders, and then calls a function with what was written there.

    Args:
        flushed: called with a folder and its items, once they are on the disk.
    """

    def __init__(self, flushed: Callable[[str, list[_Item]], None]) -> None:
        self._flushed = flushed
        self._reset()
        os.register_at_fork(after_in_child=self._reset)  # the parent process flushes

    def _reset(self) -> None:
        self._lock = Lock()
        self._waiting: defaultdict[str, list[_Item]] = defaultdict(list)
        self._idle = Event()
        self._idle.set()

    def add(self, items: Iterable[tuple[str, _Item]]) -> None:
        """Has items flushed, each given with its folder; returns at once."""
        with self._lock:
            for folder, item in items:
                self._waiting[folder].append(item)
            if not self._waiting or not self._idle.is_set():
                return
            self._idle.clear()
        Thread(target=self._work, name="trackbed-flush", daemon=True).start()

    def join(self) -> None:
        """Returns when nothing is left to be flushed."""
        self._idle.wait()

    def _work(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, defaultdict(list)
                if not waiting:
                    self._idle.set()
                    return
            is_flushed: dict[int, bool] = {}  # by device
            for folder, items in waiting.items():
                try:
                    device = os.stat(folder).st_dev
                    if device not in is_flushed:
                        is_flushed[device] = False
                        flush_file_system(folder)
                        is_flushed[device] = True
                    if is_flushed[device]:
                        self._flushed(folder, items)
                except OSError as error:
                    logger.debug("%s: its files are not known to be on the disk: %s", folder, error)
                except BaseException:  # a caller that joins must not wait for ever
                    logger.exception("%s: its files are not known to be on the disk", folder)
