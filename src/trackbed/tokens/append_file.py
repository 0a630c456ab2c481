"""The `.bin` of a pair while it grows, under a partial name."""

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Final

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import Checksum, FileSum, Writeback, clear_dead_partials, new_partial, publish
from trackbed.tokens.encode import Buffer

__all__ = ["GrowingData"]

_FLUSH_BYTES: Final = 256 << 10
_LARGE_BYTES: Final = 4 << 20
"""From this size on, a second thread that sums up costs less than it saves."""

_STEP_BYTES: Final = 4 << 20
"""Written at a time, so that the system begins early to write the first of them out."""


class GrowingData:
    """Bytes that are appended, summed up, and on their way to the disk.

    After an error nobody knows how much of a block is in the file: from then on it takes nothing more.

    Args:
        final: the name that the file is to have at the end, for errors.
        partial: where it is until then.
        file: open for writing, where the next bytes go.
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
    def create(cls, final: Path) -> "GrowingData":
        """A new file beside `final`; what killed writers of that name left is removed."""
        clear_dead_partials(final.parent, final_name=final.name)
        partial = new_partial(final)
        return cls(final, partial, partial.open("xb", buffering=0))

    @classmethod
    def reopen(cls, final: Path, partial: Path, written: FileSum) -> "GrowingData":
        """Go on with a file that was kept. What it has behind the bytes of `written` is cut off.

        Raises:
            FormatError: it does not begin with those bytes.
        """
        file = partial.open("r+b", buffering=0)
        checksum = _sum_up(file, written.size_bytes)
        if FileSum.of(checksum) != written:
            file.close()
            msg = f"{partial}: must begin with the {written.size_bytes} bytes that were kept, found others"
            raise FormatError(msg)
        file.truncate(written.size_bytes)
        found = cls(final, partial, file)
        found.checksum = checksum
        found._size_bytes = written.size_bytes
        found._writeback = Writeback(file.fileno(), written.size_bytes)
        found.is_kept = True
        found._abandoned.detach()
        return found

    def append(self, data: Buffer | bytearray) -> None:
        """Take bytes, small ones to be written with those that follow."""
        if len(data) >= _FLUSH_BYTES:
            self.flush()
            self._write(memoryview(data).cast("B"))
            return
        self._pending += data
        if len(self._pending) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is pending, while it is in the processor's cache."""
        self._write(self._pending)
        self._pending.clear()

    def keep(self, partial: Path) -> FileSum:
        """Write all that was taken, to a file that stays at `partial` whatever becomes of this process.

        Returns:
            What has been written: `reopen` goes on behind it.
        """
        self.flush()
        if partial != self.partial:
            publish(self.partial, partial)
            self.partial = partial
            self.is_kept = True
            self._abandoned.detach()
        return FileSum.of(self.checksum)

    def check_open(self) -> None:
        """Refuse to go on after the end."""
        if self._file.closed:
            msg = f"{self._final}: a builder takes nothing after finalize or discard, found more"
            raise ArgumentError(msg)

    def close(self) -> None:
        """Take nothing more; the file stays."""
        self._file.close()
        self._abandoned.detach()

    def discard(self) -> None:
        """Close and remove the file."""
        if os.getpid() == self._pid:  # what a forked process gives up is another's
            self._pending = bytearray()  # not cleared: where a flush was interrupted, its views are still there
            self.close()
            self.partial.unlink(missing_ok=True)

    def _write(self, data: memoryview | bytearray) -> None:
        if os.getpid() != self._pid:
            msg = f"{self._final}: a builder must be used in process {self._pid}, which made it, found {os.getpid()}"
            raise ArgumentError(msg)
        if isinstance(self._failure, OSError):  # nobody knows how much of that block is in the file
            raise self._failure
        if self._failure is not None:
            msg = f"{self._final}: a builder takes nothing more after it was interrupted, found more"
            raise ArgumentError(msg) from self._failure
        try:
            with memoryview(data) as view:
                if len(view) < _LARGE_BYTES:
                    # Not in a thread: two of them, meeting after every block, lose more time than this takes.
                    self.checksum.update(view)
                    self._write_all(view)
                else:
                    with ThreadPoolExecutor(1) as pool:
                        summed = pool.submit(self.checksum.update, view)
                        self._write_all(view)
                        summed.result()
        except BaseException as error:
            if isinstance(error, OSError):
                error.filename = str(self.partial)  # a full disk does not say which
            self._failure = error
            raise

    def _write_all(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            written = self._file.write(view[done : done + _STEP_BYTES]) or 0
            done += written
            self._size_bytes += written
            self._writeback.grown(self._size_bytes)


def _sum_up(file: FileIO, size_bytes: int) -> Checksum:
    """The checksums of the first bytes of a file, behind which it stands then; of all, if it has fewer."""
    checksum = Checksum()
    buffer = memoryview(bytearray(_STEP_BYTES))
    while count := file.readinto(buffer[: size_bytes - checksum.size_bytes]):
        checksum.update(buffer[:count])
    return checksum


def _remove(file: FileIO, partial: Path, pid: int) -> None:
    """What is left to do for a file that nobody closed; a forked process leaves it to the one that wrote it."""
    file.close()
    if os.getpid() == pid:
        partial.unlink(missing_ok=True)
