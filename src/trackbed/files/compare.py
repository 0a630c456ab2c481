"""Comparing files with the checksums of their chunks, on all cores."""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from trackbed.errors import FormatError
from trackbed.files.checksum import CHUNK_BYTES, FileSum, crc32
from trackbed.files.regular import open_regular

_READ_BYTES: Final = 1 << 20


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
    if len(listed) <= 1 or sum(chunk.size_bytes for chunk in listed) <= _READ_BYTES:
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
        found = _crc32(chunk)
    except FormatError as error:
        return str(error)
    except OSError as error:
        return f"{chunk.path}: {error.strerror}"
    if found == chunk.crc32:
        return ""
    return f"{chunk.path}: must have the CRC-32 {chunk.crc32} in chunk {chunk.number}, found {found}"


def _crc32(chunk: Chunk) -> str:
    value, left = 0, chunk.size_bytes
    with open(open_regular(chunk.path)[0], "rb", buffering=0) as file:
        file.seek(chunk.number * CHUNK_BYTES)
        while left > 0 and (piece := file.read(min(left, _READ_BYTES))):
            value = crc32(piece, value)
            left -= len(piece)
    return f"{value:08x}"
