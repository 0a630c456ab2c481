"""Append-only file for the `.bin` of a pair, under a partial name until the pair is complete."""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Final

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import Checksum, FileSum, Writeback, new_partial, publish
from trackbed.tokens.encode import Buffer

_FLUSH_BYTES: Final = 256 << 10
_LARGE_BYTES: Final = 4 << 20
"""Size from which computing the checksum on a second thread saves time."""

_STEP_BYTES: Final = 4 << 20
"""Bytes per write call, so that the system starts writeback early."""


class AppendFile:
    """A file to which bytes are appended, with their checksum and early writeback.

    After a failed write the length of the file is unknown, so every later write raises an error.

    Args:
        final: final path of the file, for error messages.
        partial: path of the file until it is complete.
        file: the file, open for writing at the end of its content.
    """

    def __init__(self, final: Path, partial: Path, file: FileIO) -> None:
        self.partial = partial
        self.is_kept = False
        self.checksum = Checksum()
        self._final = final
        self._file = file
        self._pid = os.getpid()
        self._abandoned = weakref.finalize(self, _remove, file, partial, self._pid)
        self._pending = bytearray()
        self._size_bytes = 0
        self._writeback = Writeback(file.fileno())
        self._failure: BaseException | None = None

    @classmethod
    def create(cls, final: Path) -> "AppendFile":
        """Creates a new file beside `final`."""
        partial = new_partial(final)
        return cls(final, partial, partial.open("xb", buffering=0))

    @classmethod
    def reopen(cls, final: Path, partial: Path, written: FileSum) -> "AppendFile":
        """Reopens a file that `keep` saved, and truncates it to the bytes of `written`."""
        file = partial.open("r+b", buffering=0)
        checksum = _checksum_start(file, written.size_bytes)
        if FileSum.of(checksum) != written:
            file.close()
            raise FormatError(
                f"{partial}: must begin with the {written.size_bytes} bytes that were saved, found others"
            )
        file.truncate(written.size_bytes)
        found = cls(final, partial, file)
        found.checksum = checksum
        found._size_bytes = written.size_bytes
        found._writeback = Writeback(file.fileno(), written.size_bytes)
        found.is_kept = True
        found._abandoned.detach()
        return found

    def append(self, data: Buffer | bytearray) -> None:
        """Appends bytes. Small pieces are buffered and written together."""
        if len(data) >= _FLUSH_BYTES:
            self.flush()
            self._write(memoryview(data).cast("B"))
            return
        self._pending += data
        if len(self._pending) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the buffered bytes, while they are in the CPU cache."""
        self._write(self._pending)
        self._pending.clear()

    def keep(self, partial: Path) -> FileSum:
        """Writes all buffered bytes, and keeps the file at `partial` even if this process ends.

        Returns:
            Size and checksum of the written bytes, for `reopen`.
        """
        self.flush()
        if partial != self.partial:
            publish(self.partial, partial)
            self.partial = partial
            self.is_kept = True
            self._abandoned.detach()
        return FileSum.of(self.checksum)

    def check_open(self) -> None:
        """Raises an error if the file is closed."""
        if self._file.closed:
            raise ArgumentError(f"{self._final}: a builder must not be used after finalize or discard")

    def close(self) -> None:
        """Closes the file without removing it."""
        self._file.close()
        self._abandoned.detach()

    def discard(self) -> None:
        """Closes and removes the file."""
        if os.getpid() == self._pid:  # in a forked process the file belongs to the parent
            self._pending = bytearray()  # not cleared: after an interrupted flush, views of the buffer may still exist
            self.close()
            self.partial.unlink(missing_ok=True)

    def _write(self, data: memoryview | bytearray) -> None:
        if os.getpid() != self._pid:
            raise ArgumentError(
                f"{self._final}: a builder must be used in process {self._pid}, which created it, found {os.getpid()}"
            )
        if isinstance(self._failure, OSError):  # the length of the file is unknown
            raise self._failure
        if self._failure is not None:
            raise ArgumentError(
                f"{self._final}: a builder must not be used after it was interrupted"
            ) from self._failure
        try:
            with memoryview(data) as view:
                if len(view) < _LARGE_BYTES:
                    # On this thread: synchronizing two threads after every block takes longer than the checksum.
                    self.checksum.update(view)
                    self._write_all(view)
                else:
                    with ThreadPoolExecutor(1) as pool:
                        summed = pool.submit(self.checksum.update, view)
                        self._write_all(view)
                        summed.result()
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(self.partial)  # the error of a full disk names no file
            self._failure = error
            raise

    def _write_all(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            written = self._file.write(view[done : done + _STEP_BYTES]) or 0
            done += written
            self._size_bytes += written
            self._writeback.grown(self._size_bytes)


def _checksum_start(file: FileIO, size_bytes: int) -> Checksum:
    """Checksum of the first `size_bytes` of a file, or of all if it has fewer; leaves the file position after them."""
    checksum = Checksum()
    buffer = memoryview(bytearray(_STEP_BYTES))
    while count := file.readinto(buffer[: size_bytes - checksum.size_bytes]):
        checksum.update(buffer[:count])
    return checksum


def _remove(file: FileIO, partial: Path, pid: int) -> None:
    """Closes and removes a file that was abandoned without being closed; in a forked process only closes it."""
    file.close()
    if os.getpid() == pid:
        partial.unlink(missing_ok=True)
