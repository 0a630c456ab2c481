"""Large mapped files, written out and let go while they are still being filled."""

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Final

from trackbed.files.checksum import CHUNK_BYTES, Checksum
from trackbed.files.writeback import write_out

__all__ = ["WrittenBehind"]

_LOOK_SECONDS: Final = 0.02


class WrittenBehind:
    """A mapped file that is filled from its beginning to its end.

    A thread follows: it sums up each chunk that is final, writes it to the disk, and gives its memory back. So a file
    of any size takes a few hundred MiB, and to fill it costs no more fresh memory than that; what the system does for
    each fresh page takes longer than to compute an index.

    Args:
        descriptor: the open file; closed at the end.
        mapped: all of it.
    """

    def __init__(self, descriptor: int, mapped: mmap.mmap) -> None:
        self._descriptor = descriptor
        self._mapped = mapped
        self._final_bytes = 0
        self._ended = Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trackbed-behind")
        self._checksum: Future[Checksum] = self._pool.submit(self._follow)

    def filled(self, size_bytes: int) -> None:
        """Take note that the first bytes are final."""
        self._final_bytes = max(self._final_bytes, size_bytes)

    def finish(self) -> Checksum:
        """Wait for what is left; all of the file is final. Returns its checksums.

        Raises:
            OSError: it cannot be written.
        """
        self.filled(len(self._mapped))
        try:
            return self._checksum.result()
        finally:
            self.stop()

    def stop(self) -> None:
        """Give up: nothing follows any more."""
        self._ended.set()
        self._pool.shutdown()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _follow(self) -> Checksum:
        checksum, size = Checksum(), len(self._mapped)
        with memoryview(self._mapped) as data:
            while checksum.size_bytes < size and not self._ended.is_set():
                start = checksum.size_bytes
                stop = min(start + CHUNK_BYTES, size)
                if self._final_bytes < stop:
                    self._ended.wait(_LOOK_SECONDS)
                    continue
                checksum.update(data[start:stop])
                write_out(self._descriptor, start, stop - start)
                if hasattr(mmap, "MADV_DONTNEED") and hasattr(os, "posix_fadvise"):
                    self._mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)
                    os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
        return checksum
