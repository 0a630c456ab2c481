"""Opening inputs, on a disk or in an object store."""

import io
import os
from collections.abc import Iterable
from typing import BinaryIO, Final

from trackbed.errors import FormatError
from trackbed.files import stores
from trackbed.files.stores import Address, ObjectRange, ObjectStamp
from trackbed.preprocess.inputs import InputFile

_OBJECT_CHUNK_BYTES: Final = 16 << 20
"""Text per chunk of an object, so that the latency of a store matters little."""

_BUFFER_BYTES: Final = 256 << 10
_FIRST_READ_BYTES: Final = 256 << 10
_READ_AHEAD_BYTES: Final = 16 << 20
_RANGE_BYTES: Final = 4 << 20
"""Bytes of a request: four are in flight to fill the read-ahead."""


def open_input(file: InputFile) -> BinaryIO:
    """Opens an input for reading, without a buffer of its own on a disk."""
    if file.address is not None:
        reader = _ObjectReader(file.address, ObjectStamp(file.size_bytes, file.version))
        return io.BufferedReader(reader, _BUFFER_BYTES)  # whose reads are never short
    raw = file.path.open("rb", buffering=0)
    size = os.fstat(raw.fileno()).st_size
    if size != file.size_bytes:
        raw.close()
        raise FormatError(f"{file.name}: a file must keep its {file.size_bytes} bytes while it is read, found {size}")
    return raw


def chunk_bytes_of(files: Iterable[InputFile], chunk_bytes: int) -> int:
    """Returns the size of the chunks of files: larger if there are objects of a store among them."""
    return max(chunk_bytes, _OBJECT_CHUNK_BYTES) if any(file.address for file in files) else chunk_bytes


class _ObjectReader(io.RawIOBase):
    """Object of a store as a file. Reads ahead further and further while reads follow each other.

    Args:
        address: the object.
        stamp: its identity at planning time.
    """

    def __init__(self, address: Address, stamp: ObjectStamp) -> None:
        super().__init__()
        self._address = address
        self._stamp = stamp
        self._position = 0
        self._block = memoryview(b"")
        self._block_start = 0
        self._ahead = _FIRST_READ_BYTES

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position of the next read."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._stamp.size_bytes}[whence]
        self._position = begin + offset
        return self._position

    def readinto(self, buffer: object) -> int:
        """Reads up to the size of a buffer; returns 0 at the end."""
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]  # whatever has a buffer
        wanted = min(len(view), self._stamp.size_bytes - self._position)
        if wanted <= 0:
            return 0
        if not self._block_start <= self._position < self._block_start + len(self._block):
            self._fetch(wanted)
        start = self._position - self._block_start
        found = self._block[start : start + wanted]
        view[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _fetch(self, wanted: int) -> None:
        """Fetches the block at the position: the wanted bytes, and more if the last block ended here."""
        is_next = self._block and self._position == self._block_start + len(self._block)
        self._ahead = min(2 * self._ahead, _READ_AHEAD_BYTES) if is_next else _FIRST_READ_BYTES
        stop = min(self._position + max(wanted, self._ahead), self._stamp.size_bytes)
        self._block = memoryview(b"")  # freed before the next one is fetched
        ranges = [
            ObjectRange(self._address, self._stamp, start, min(start + _RANGE_BYTES, stop))
            for start in range(self._position, stop, _RANGE_BYTES)
        ]
        parts = stores.fetch(ranges)
        self._block = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
        self._block_start = self._position
