"""The `.idx` format, byte for byte (docs/formats/indexed.md).

Shapes: N sequences, D documents; the file holds D + 1 document borders.
"""

import hashlib
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import FormatError
from trackbed.files import Stamp, check_stamp, let_go, map_readonly, read_ahead
from trackbed.tokens.dtype import DType

__all__ = ["HEADER_BYTES", "Header", "SequenceIndex", "encode_header", "map_file", "open_index"]

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, N, D + 1
HEADER_BYTES: Final = _FIELDS.size
_END_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Header:
    """What the first 34 bytes of an `.idx` say."""

    dtype: type[np.number[Any]]
    sequence_count: int
    document_count: int
    """Document borders, one more than there are documents."""

    @property
    def pointers_at(self) -> int:
        """Byte at which the pointers begin, after the lengths."""
        return HEADER_BYTES + 4 * self.sequence_count

    @property
    def borders_at(self) -> int:
        """Byte at which the document borders begin, after the pointers."""
        return self.pointers_at + 8 * self.sequence_count

    @property
    def size_bytes(self) -> int:
        """Size of the whole file without modes; with them it has one byte a sequence more."""
        return self.borders_at + 8 * self.document_count


def encode_header(header: Header) -> bytes:
    """The 34 bytes of `header`."""
    code = DType.code_from_dtype(header.dtype)
    return _FIELDS.pack(MAGIC, VERSION, code, header.sequence_count, header.document_count)


def decode_header(raw: bytes, *, path: str | Path) -> Header:
    """What the first bytes of the file at `path` say.

    Raises:
        FormatError: too few bytes, another magic or version, an unknown dtype code, or no document border.
    """
    if len(raw) < HEADER_BYTES:
        msg = f"{path}: an index header has {HEADER_BYTES} bytes, this file has {len(raw)}"
        raise FormatError(msg)
    magic, version, code, sequences, borders = _FIELDS.unpack(raw[:HEADER_BYTES])
    if magic != MAGIC:
        msg = f"{path}: the magic must be {MAGIC!r}, found {magic!r}"
        raise FormatError(msg)
    if version != VERSION:
        msg = f"{path}: the version must be {VERSION}, found {version}"
        raise FormatError(msg)
    try:
        dtype = DType.dtype_from_code(code)
    except ValueError:
        msg = f"{path}: the dtype code must be in [1, {len(DType)}], found {code}"
        raise FormatError(msg) from None
    if borders < 1:
        msg = f"{path}: document_count must be at least 1, found {borders}"
        raise FormatError(msg)
    return Header(dtype, sequences, borders)


class SequenceIndex:
    """The arrays of an `.idx`: views of one memory map, made when the first of them is asked for.

    Args:
        path: the file.
        ends: what was read of it.
        multimodal: whether its modes are wanted.
    """

    def __init__(self, path: str | Path, ends: "IndexEnds", *, multimodal: bool) -> None:
        self.dtype = ends.header.dtype
        self.dtype_size = np.dtype(ends.header.dtype).itemsize
        self.sequence_count = ends.header.sequence_count
        self.document_count = ends.header.document_count
        self.ends = ends
        self.path = path
        self._multimodal = multimodal

    @cached_property
    def _mapped(self) -> npt.NDArray[np.uint8]:
        check_stamp(self.path, self.ends.stamp)
        return map_file(self.path)

    def map(self) -> None:
        """Map the file now: who reads it later reads it as it is."""
        _ = self._mapped

    def read_ahead(self, start: int, stop: int) -> None:
        """Have the system begin to read the lengths of sequences `[start, stop)`, up to 8 million of them."""
        read_ahead(self.sequence_lengths[start:stop])

    def let_go(self) -> None:
        """Give back the memory of what was read of it, if it is mapped."""
        if "_mapped" in vars(self):
            let_go(self._mapped)

    @cached_property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """`[N]` tokens in each sequence."""
        return self._mapped[HEADER_BYTES : self.ends.header.pointers_at].view("<i4")

    @cached_property
    def sequence_pointers(self) -> npt.NDArray[np.int64]:
        """`[N]` byte offset of each sequence in the `.bin`."""
        return self._mapped[self.ends.header.pointers_at : self.ends.header.borders_at].view("<i8")

    @cached_property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """`[D + 1]` first sequence of each document, then N."""
        return self._mapped[self.ends.header.borders_at : self.ends.header.size_bytes].view("<i8")

    @cached_property
    def sequence_modes(self) -> npt.NDArray[np.int8] | None:
        """`[N]` mode of each sequence of a multimodal file, else None."""
        first = self.ends.header.size_bytes
        return self._mapped[first : first + self.sequence_count].view(np.int8) if self._multimodal else None

    def __len__(self) -> int:
        return self.sequence_count

    def __getitem__(self, idx: int) -> tuple[np.int64, np.int32, np.int8 | None]:
        """Byte pointer, length and mode of one sequence."""
        mode = None if self.sequence_modes is None else self.sequence_modes[idx]
        return self.sequence_pointers[idx], self.sequence_lengths[idx], mode

    @property
    def data_bytes(self) -> int:
        """Size that the `.bin` must have at least, from the last sequence; 0 without any."""
        return self.ends.last_pointer + self.ends.last_length * self.dtype_size


@dataclass(frozen=True, slots=True)
class IndexEnds:
    """What is read of an `.idx` to open it: a few of its bytes, whatever its size."""

    header: Header
    size_bytes: int
    sha256: str
    """Of its header and its first and last 4 KiB."""
    last_length: int
    """Tokens in the last sequence, 0 without any."""
    last_pointer: int
    """Byte offset of the last sequence, 0 without any."""
    last_border: int
    """The last document border, which must be N."""
    stamp: Stamp
    """What tells the file from another that takes its place."""


def open_index(path: str | Path, *, multimodal: bool = False) -> SequenceIndex:
    """Open an `.idx` file. Costs neither time nor memory by sequence, and keeps no descriptor.

    Args:
        path: the file.
        multimodal: whether modes must be there; without it they are ignored.

    Raises:
        FormatError: the header is not one, or the file's size is not what its counts say.
        OSError: the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        ends = _read_ends(descriptor, path, multimodal=multimodal)
    finally:
        os.close(descriptor)
    return SequenceIndex(path, ends, multimodal=multimodal)


def _read_ends(descriptor: int, path: str | Path, *, multimodal: bool) -> IndexEnds:
    status = os.fstat(descriptor)
    head = os.pread(descriptor, HEADER_BYTES + _END_BYTES, 0)
    header = decode_header(head[:HEADER_BYTES], path=path)
    mode_bytes = header.sequence_count
    sizes = {header.size_bytes + mode_bytes} if multimodal else {header.size_bytes, header.size_bytes + mode_bytes}
    if status.st_size not in sizes:
        msg = (
            f"{path}: sequence_count {header.sequence_count} and document_count {header.document_count} "
            f"make {' or '.join(map(str, sorted(sizes)))} bytes{' with modes' if multimodal else ''}, "
            f"this file has {status.st_size}"
        )
        raise FormatError(msg)
    tail = os.pread(descriptor, _END_BYTES, max(0, status.st_size - _END_BYTES))

    def number(end: int, size_bytes: int) -> int:
        raw = head[end - size_bytes : end] if end <= len(head) else os.pread(descriptor, size_bytes, end - size_bytes)
        return int.from_bytes(raw, "little", signed=True)

    empty = header.sequence_count == 0
    return IndexEnds(
        header=header,
        size_bytes=status.st_size,
        sha256=hashlib.sha256(head + tail).hexdigest(),
        last_length=0 if empty else number(header.pointers_at, 4),
        last_pointer=0 if empty else number(header.borders_at, 8),
        last_border=number(header.size_bytes, 8),
        stamp=Stamp.of(status),
    )


def map_file(path: str | Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped read-only. The map lives as long as any array cut from it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return map_readonly(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
