"""Reading of ranges of a file of a checkpoint, wherever it lies. The checksum of every MiB of a payload is compared."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trackbed.checkpoint.format.extents import SIDE_NAME, SUM_BYTES
from trackbed.errors import CheckpointError
from trackbed.files.checksum import crc32

Bytes = npt.NDArray[np.uint8]


class RangeReader(ABC):
    """Reads ranges of a file.

    Args:
        name: name of the file, for errors.
        num_bytes: its size.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        self._name = name
        self._num_bytes = num_bytes
        self._scratch = np.empty(0, dtype=np.uint8)
        self._head = b""
        """First bytes, once they have been read."""

    @abstractmethod
    def read_into(self, target: Bytes, start: int, what: str) -> None:
        """Fills an array from a place of the file on.

        Args:
            target: contiguous array.
            start: first byte in the file.
            what: name of what is read, for errors.
        """

    @abstractmethod
    def hold(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetches what is read next, where one request for each range takes long, in the place of what is held.

        Args:
            ranges: first byte and end of each.
        """

    @abstractmethod
    def announce(self, end: int) -> None:
        """Says that reads follow each other up to a byte of the file."""

    def first_bytes(self, num_bytes: int) -> bytes:
        """First bytes of the file; fewer if it is shorter."""
        num_bytes = min(num_bytes, self._num_bytes)
        if len(self._head) < num_bytes:
            found = np.empty(num_bytes, dtype=np.uint8)
            self.read_into(found, 0, "its beginning")
            self._head = found.tobytes()
        return self._head[:num_bytes]

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
            self.announce(payload_start + first + len(target))
            self.read_into(target, payload_start + first, what)
            return
        end = first + len(target)
        self.announce(payload_start + min(-(-end // SUM_BYTES) * SUM_BYTES, payload_bytes))
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
