"""Writeback of large mapped files while they are still being filled."""

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Final

from trackbed.files.checksum import CHUNK_BYTES, Checksum
from trackbed.files.writeback import write_out

__all__ = ["BackgroundWriteback"]

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
