"""Reading of the files of a checkpoint: whole ones, and payloads, of which the checksum of every MiB is compared."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trackbed.checkpoint.format.extents import SIDE_NAME, SUM_BYTES
from trackbed.errors import CheckpointError, FormatError
from trackbed.files.checksum import crc32
from trackbed.files.regular import open_regular

Bytes = npt.NDArray[np.uint8]


class FileReader:
    """Reads ranges of a file.

    Args:
        descriptor: descriptor of the open file.
        name: name of the file, for errors.
        num_bytes: its size.
    """

    def __init__(self, descriptor: int, name: str, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._name = name
        self._num_bytes = num_bytes
        self._scratch = np.empty(0, dtype=np.uint8)

    @classmethod
    @contextmanager
    def open(cls, folder: Path, name: str) -> "Iterator[FileReader]":
        """Opens a file of a checkpoint."""
        try:
            descriptor, size = open_file(folder, name)
        except OSError as error:
            raise CheckpointError(f"{name}: must be in {folder}, but cannot be opened: {error.strerror}") from error
        try:
            yield cls(descriptor, name, size)
        finally:
            os.close(descriptor)

    def first_bytes(self, num_bytes: int) -> bytes:
        """First bytes of the file; fewer if it is shorter."""
        return os.pread(self._descriptor, num_bytes, 0)

    def require(self, start: int, num_bytes: int, what: str) -> None:
        """Checks that the file has some bytes, before memory is taken for them.

        Args:
            start: first byte in the file.
            num_bytes: number of bytes.
            what: name of what is to be read, for errors.
        """
        if start + num_bytes > self._num_bytes:
            raise self._too_short(start + num_bytes, self._num_bytes, what)

    def _too_short(self, end: int, found: int, what: str) -> CheckpointError:
        return CheckpointError(f"{self._name}: {what} must end at byte {end:,}, but the file ends at {found:,}")

    def read_into(self, target: Bytes, start: int, what: str) -> None:
        """Fills an array from a place of the file on.

        Args:
            target: contiguous array.
            start: first byte in the file.
            what: name of what is read, for errors.
        """
        view = target.data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done : done + (1 << 30)]], start + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self._name}: {what} must be at byte {start:,}, but cannot be read: {error.strerror}"
                ) from error
            if count == 0:
                raise self._too_short(start + len(view), start + done, what)
            done += count

    def read_payload(
        self, target: Bytes, payload_start: int, payload_bytes: int, first: int, sums: npt.NDArray[np.uint32], what: str
    ) -> None:
        """Fills an array with a range of a payload, and checks each MiB of the payload that it touches.

        Args:
            target: contiguous array.
            payload_start: first byte of the payload in the file.
            payload_bytes: size of the payload.
            first: first byte of the range in the payload.
            sums: CRC-32 of each MiB of the payload, from the side file; empty to check nothing.
            what: name of the payload, for errors.
        """
        if not len(sums):
            self.read_into(target, payload_start + first, what)
            return
        end = first + len(target)
        position = first
        while position < end:
            low = position // SUM_BYTES * SUM_BYTES
            if position == low and (end - low >= SUM_BYTES or end == payload_bytes):
                # A whole MiB goes straight to the target, and is checked while it is in the processor's cache.
                high = min(end, low + SUM_BYTES)
                piece = target[low - first : high - first]
                self.read_into(piece, payload_start + low, what)
                self._check(piece, low, sums, payload_start, what)
                position = high
                continue
            high = min(low + SUM_BYTES, payload_bytes)
            piece = self._buffer(high - low)
            self.read_into(piece, payload_start + low, what)
            self._check(piece, low, sums, payload_start, what)
            stop = min(end, high)
            target[position - first : stop - first] = piece[position - low : stop - low]
            position = stop

    def _buffer(self, num_bytes: int) -> Bytes:
        if len(self._scratch) < num_bytes:
            self._scratch = np.empty(num_bytes, dtype=np.uint8)
        return self._scratch[:num_bytes]

    def _check(self, piece: Bytes, low: int, sums: npt.NDArray[np.uint32], payload_start: int, what: str) -> None:
        """Compares the checksum of a MiB."""
        wanted, found = int(sums[low // SUM_BYTES]), crc32(piece)
        if wanted != found:
            raise CheckpointError(
                f"{self._name}: {what}: the checksum of the MiB at byte {payload_start + low:,} must be {wanted:08x}, "
                f"as {SIDE_NAME} says, but is {found:08x}: the file is damaged"
            )


def open_file(folder: Path, name: str) -> tuple[int, int]:
    """Opens a regular file of a checkpoint. Returns its descriptor, and its size in bytes."""
    try:
        return open_regular(folder / name)
    except FormatError as error:
        raise CheckpointError(str(error).removeprefix(f"{folder}/")) from error


def maybe_read_file(folder: Path, name: str) -> bytes | None:
    """Reads a file of a checkpoint; None if there is none."""
    try:
        descriptor, _ = open_file(folder, name)
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{name}: must be a file that can be read, but is not: {error.strerror}") from error
    except MemoryError as error:
        raise CheckpointError(f"{name}: must fit into memory, but does not") from error
