"""CRC-32 of a file in chunks of 64 MiB, so that damage can be located and chunks compared in parallel.

ISA-L computes it with the processor's own instructions: zlib, at 1 GB/s or less, would take longer than building an
index.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from isal import isal_zlib

from trackbed.errors import FormatError
from trackbed.files.regular import open_regular

CHUNK_BYTES: Final = 64 << 20
crc32 = isal_zlib.crc32
_READ_BYTES: Final = 4 << 20
_DIGITS: Final = 8


class Checksum:
    """Incremental checksums of bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._whole: list[int] = []
        self._current = 0
        self._chunk_left = CHUNK_BYTES

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Appends the next bytes."""
        view = memoryview(data).cast("B")
        while len(view) > 0:
            piece = view[: self._chunk_left]
            self._current = crc32(piece, self._current)
            self.size_bytes += len(piece)
            self._chunk_left -= len(piece)
            view = view[len(piece) :]
            if self._chunk_left == 0:
                self._whole.append(self._current)
                self._current, self._chunk_left = 0, CHUNK_BYTES

    def chunks(self) -> list[str]:
        """Eight hexadecimal digits per chunk of 64 MiB, the last chunk shorter; none for an empty file."""
        open_chunk = [self._current] if self._chunk_left < CHUNK_BYTES else []
        return [f"{value:08x}" for value in [*self._whole, *open_chunk]]


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size and checksums of one file, as seals and manifests keep them."""

    size_bytes: int
    crc32: list[str]
    """One per 64 MiB, eight hexadecimal digits each."""

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "FileSum":
        """Parses a decoded JSON record.

        Raises:
            ValueError, TypeError: it is no such record.
        """
        found = cls(**record)
        size, sums = found.size_bytes, found.crc32
        is_size = type(size) is int and 0 <= size < 1 << 63
        if not is_size or type(sums) is not list or {*map(type, sums)} - {str} or {*map(len, sums)} - {_DIGITS}:
            what = f"{str(size)[:80]} and {str(sums)[:80]}"
            raise ValueError(f"size_bytes must be a number and crc32 texts of {_DIGITS} digits, found {what}")
        return found

    @classmethod
    def of(cls, checksum: Checksum) -> "FileSum":
        """Size and checksums of the bytes appended to `checksum`."""
        return cls(checksum.size_bytes, checksum.chunks())


def checksum_bytes(*parts: bytes | memoryview) -> Checksum:
    """Computes the checksums of the concatenation of `parts`."""
    checksum = Checksum()
    for part in parts:
        checksum.update(part)
    return checksum


def checksum_file(path: Path, *, progress: Callable[[int], None] | None = None) -> Checksum:
    """Computes the checksums of a file; calls `progress` after each piece read, with the number of its bytes."""
    checksum = Checksum()
    buffer = bytearray(_READ_BYTES)
    with open(open_regular(path)[0], "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum.update(memoryview(buffer)[:count])
            if progress is not None:
                progress(count)
    return checksum


_COMPARED_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a file, and its expected CRC-32."""

    path: str
    number: int
    size_bytes: int
    crc32: str


def chunks_of(path: str, sums: FileSum) -> Iterator[Chunk]:
    """Yields the chunks of the file at `path`, which has the size that its checksums state."""
    for number, wanted in enumerate(sums.crc32):
        size = min(CHUNK_BYTES, sums.size_bytes - number * CHUNK_BYTES)
        yield Chunk(path, number, size, wanted)


def compare_chunks(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, str]]:
    """Yields each chunk, in order, with a sentence that describes how it differs; empty if it does not."""
    listed: Sequence[Chunk] = list(chunks)
    if len(listed) <= 1 or sum(chunk.size_bytes for chunk in listed) <= _COMPARED_BYTES:
        yield from zip(listed, map(_compare, listed), strict=True)
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            yield from zip(listed, pool.map(_compare, listed), strict=True)
        except BaseException:  # a caller that does not want the rest does not wait for it
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compare(chunk: Chunk) -> str:
    try:
        crc = _crc32(chunk)
    except FormatError as error:
        return str(error)
    except OSError as error:
        return f"{chunk.path}: {error.strerror}"
    if crc == chunk.crc32:
        return ""
    return f"{chunk.path}: must have the CRC-32 {chunk.crc32} in chunk {chunk.number}, found {crc}"


def _crc32(chunk: Chunk) -> str:
    value, left = 0, chunk.size_bytes
    with open(open_regular(chunk.path)[0], "rb", buffering=0) as file:
        file.seek(chunk.number * CHUNK_BYTES)
        while left > 0 and (piece := file.read(min(left, _COMPARED_BYTES))):
            value = crc32(piece, value)
            left -= len(piece)
    return f"{value:08x}"
