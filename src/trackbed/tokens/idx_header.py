"""The header of an `.idx`, where its arrays lie (docs/formats/indexed.md), and the checksum of its lengths."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import check_cancelled
from trackbed.errors import FormatError
from trackbed.files import crc32
from trackbed.tokens.dtype import DType

MAGIC: Final = b"MMIDIDX\x00\x00"
_OLDER_MAGIC: Final = b"TNTIDX\x00\x00"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, N, D + 1
HEADER_BYTES: Final = _FIELDS.size


@dataclass(frozen=True, slots=True)
class Header:
    """Contents of the first 34 bytes of an `.idx`."""

    dtype: type[np.number[Any]]
    sequence_count: int
    document_count: int
    """Number of document borders, one more than the number of documents."""

    @property
    def pointers_at(self) -> int:
        """Byte offset of the pointers, which follow the lengths."""
        return HEADER_BYTES + 4 * self.sequence_count

    @property
    def borders_at(self) -> int:
        """Byte offset of the document borders, which follow the pointers."""
        return self.pointers_at + 8 * self.sequence_count

    @property
    def size_bytes(self) -> int:
        """Size of the file without modes; modes add one byte per sequence."""
        return self.borders_at + 8 * self.document_count


def encode_header(header: Header) -> bytes:
    """The 34 bytes of `header`."""
    code = DType.code_from_dtype(header.dtype)
    return _FIELDS.pack(MAGIC, VERSION, code, header.sequence_count, header.document_count)


def decode_header(raw: bytes | memoryview, *, path: str | Path) -> Header:
    """Decodes the header from the first bytes of the file at `path`.

    Raises:
        FormatError: too few bytes, another magic or version, an unknown dtype code, or no document border.
    """
    if len(raw) < HEADER_BYTES:
        raise FormatError(f"{path}: an index header has {HEADER_BYTES} bytes, this file has {len(raw)}")
    magic, version, code, sequences, borders = _FIELDS.unpack(raw[:HEADER_BYTES])
    if magic != MAGIC:
        older = (
            ", that of fairseq's older format (cached or lazy), which is not read: make the pair again with trackbed "
            "preprocess, or with --dataset-impl mmap"
        )
        hint = older if magic.startswith(_OLDER_MAGIC) else ""
        raise FormatError(f"{path}: the magic must be {MAGIC!r}, found {magic!r}{hint}")
    if version != VERSION:
        raise FormatError(f"{path}: the version must be {VERSION}, found {version}")
    try:
        dtype = DType.dtype_from_code(code)
    except ValueError:
        raise FormatError(f"{path}: the dtype code must be in [1, {len(DType)}], found {code}") from None
    if borders < 1:
        raise FormatError(f"{path}: document_count must be at least 1, found {borders}")
    return Header(dtype, sequences, borders)


_STRIDE: Final = 1 << 20
"""Lengths per check for cancellation."""


def checksum_lengths(*vectors: npt.NDArray[Any]) -> str:
    """Returns the CRC-32 of vectors of numbers as little-endian int32, in eight hexadecimal digits.

    >>> checksum_lengths(np.array([3, 1, 2])), checksum_lengths(np.array([3, 2, 1]))
    ('6ae8dc8a', 'f6d27487')
    >>> checksum_lengths(np.array([3, 1]), np.array([2]))
    '6ae8dc8a'
    """
    value = 0
    for numbers in vectors:
        for start in range(0, len(numbers), _STRIDE):
            check_cancelled(start)
            value = crc32(np.ascontiguousarray(numbers[start : start + _STRIDE], dtype="<i4").data, value)
    return f"{value:08x}"
