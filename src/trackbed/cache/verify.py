"""Reading every byte of a cache, and comparing it with the manifests."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trackbed.cache.fingerprint import fingerprint
from trackbed.cache.inventory import Condition, Inventory, StoredEntry
from trackbed.cache.npy import read_npy_spec
from trackbed.errors import FormatError
from trackbed.files import CHUNK_BYTES, FileSum, Writer, crc32

__all__ = ["bytes_to_read", "find_problems"]

_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a file, and what its CRC-32 must be."""

    path: str
    number: int
    size_bytes: int
    crc32: str


def bytes_to_read(inventory: Inventory) -> int:
    """Bytes that `find_problems` reads."""
    return sum(chunk.size_bytes for chunk in _chunks(inventory))


def find_problems(inventory: Inventory, *, progress: Callable[[int], None] | None = None) -> Iterator[str]:
    """What is wrong in a cache: one line each, which begins with a path.

    Files are compared with their manifests, byte for byte, by all cores; entries without a manifest by their headers.
    Partial files whose writer is dead are a problem too, as nobody needs them. An entry that is removed or built
    meanwhile may be reported.

    Args:
        inventory: what lies there.
        progress: called with the number of bytes after each chunk read.
    """
    for entry in inventory.entries:
        yield from entry.problems
        if entry.record is not None and fingerprint(entry.record.decisions) != entry.fingerprint:
            path = entry.manifest.path if entry.manifest is not None else entry.path
            yield f"{path}: the fingerprint must be that of the decisions, found {entry.fingerprint}"
        yield from _compare_headers(entry)
    chunks = list(_chunks(inventory))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            for chunk, problem in zip(chunks, pool.map(_compare, chunks), strict=True):
                if problem:
                    yield problem
                if progress is not None:
                    progress(chunk.size_bytes)
        except BaseException:  # whoever does not want the rest does not wait for it
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    for partial in inventory.partials:
        if partial.writer is Writer.dead:
            yield f"{partial.path}: nobody must have left partial files, found the writer of this one dead"


def _compare_headers(entry: StoredEntry) -> Iterator[str]:
    """What the arrays of a whole entry hold, against its manifest."""
    if entry.record is None or entry.condition is not Condition.whole:
        return
    for name, wanted in entry.record.arrays.items():
        path = f"{entry.path}-{name}.npy"
        try:
            header = read_npy_spec(Path(path))
        except (FormatError, OSError) as error:
            yield str(error) if isinstance(error, FormatError) else f"{path}: {error.strerror}"
            continue
        if (header.dtype, header.shape) != (wanted.dtype, wanted.shape):
            found = f"{header.dtype} of shape {header.shape}"
            yield f"{path}: must hold {wanted.dtype} of shape {wanted.shape}, found {found}"


def _chunks(inventory: Inventory) -> Iterator[_Chunk]:
    """All chunks whose checksums are known, of files that have the right size."""
    for entry in inventory.entries:
        sums = {} if entry.record is None else entry.record.files
        for file in entry.files:
            found = sums.get(file.path.rpartition("/")[2])
            if found is not None and found.size_bytes == file.size_bytes:
                yield from _chunks_of(file.path, found)


def _chunks_of(path: str, found: FileSum) -> Iterator[_Chunk]:
    for number, wanted in enumerate(found.crc32):
        size = min(CHUNK_BYTES, found.size_bytes - number * CHUNK_BYTES)
        yield _Chunk(path, number, size, wanted)


def _compare(chunk: _Chunk) -> str:
    """What is wrong with a chunk, or nothing."""
    try:
        found = _crc32(chunk)
    except OSError as error:
        return f"{chunk.path}: {error.strerror}"
    if found == chunk.crc32:
        return ""
    return f"{chunk.path}: must have the CRC-32 {chunk.crc32} in chunk {chunk.number}, found {found}"


def _crc32(chunk: _Chunk) -> str:
    value, left = 0, chunk.size_bytes
    with open(chunk.path, "rb", buffering=0) as file:  # noqa: PTH123  there may be thousands
        file.seek(chunk.number * CHUNK_BYTES)
        while left > 0 and (piece := file.read(min(left, _READ_BYTES))):
            value = crc32(piece, value)
            left -= len(piece)
    return f"{value:08x}"
