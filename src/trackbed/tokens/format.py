"""The `.idx` format, byte for byte (docs/formats/indexed.md).

Shapes: N sequences, D documents; the file holds D + 1 document borders.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import FormatError
from trackbed.tokens.dtype import DType

__all__ = ["HEADER_BYTES", "Header", "SequenceIndex", "encode_header", "map_file", "open_index"]

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, N, D + 1
HEADER_BYTES: Final = _FIELDS.size
_SEQUENCE_BYTES: Final = 4 + 8  # length and byte pointer
_BORDER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Header:
    """What the first 34 bytes of an `.idx` say."""

    dtype: type[np.number[Any]]
    sequence_count: int
    document_count: int
    """Document borders, one more than there are documents."""

    @property
    def size_bytes(self) -> int:
        """Size of the whole file without modes; with them it has one byte a sequence more."""
        return HEADER_BYTES + _SEQUENCE_BYTES * self.sequence_count + _BORDER_BYTES * self.document_count


def encode_header(header: Header) -> bytes:
    """The 34 bytes of `header`."""
    code = DType.code_from_dtype(header.dtype)
    return _FIELDS.pack(MAGIC, VERSION, code, header.sequence_count, header.document_count)


def decode_header(raw: bytes, *, path: Path) -> Header:
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
    """The arrays of an `.idx`, as views of one memory map that lives as long as any of them.

    Args:
        header: what the first bytes say.
        sequence_lengths: `[N]` int32, tokens in each sequence.
        sequence_pointers: `[N]` int64, byte offset of each sequence in the `.bin`.
        document_indices: `[D + 1]` int64, first sequence of each document, then N.
        sequence_modes: `[N]` int8 in a multimodal file, else None.
    """

    def __init__(
        self,
        header: Header,
        sequence_lengths: npt.NDArray[np.int32],
        sequence_pointers: npt.NDArray[np.int64],
        document_indices: npt.NDArray[np.int64],
        sequence_modes: npt.NDArray[np.int8] | None,
    ) -> None:
        self.dtype = header.dtype
        self.dtype_size = np.dtype(header.dtype).itemsize
        self.sequence_count = header.sequence_count
        self.document_count = header.document_count
        self.sequence_lengths = sequence_lengths
        self.sequence_pointers = sequence_pointers
        self.document_indices = document_indices
        self.sequence_modes = sequence_modes

    def __len__(self) -> int:
        return self.sequence_count

    def __getitem__(self, idx: int) -> tuple[np.int64, np.int32, np.int8 | None]:
        """Byte pointer, length and mode of one sequence."""
        mode = None if self.sequence_modes is None else self.sequence_modes[idx]
        return self.sequence_pointers[idx], self.sequence_lengths[idx], mode

    @property
    def data_bytes(self) -> int:
        """Size that the `.bin` must have at least, from the last sequence; 0 without any."""
        if self.sequence_count == 0:
            return 0
        return int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype_size


def open_index(path: Path, *, multimodal: bool = False) -> SequenceIndex:
    """Map an `.idx` file. Costs neither time nor memory by sequence.

    Args:
        path: the file.
        multimodal: whether modes must be there; without it they are ignored.

    Raises:
        FormatError: the header is not one, or the file's size is not what its counts say.
        OSError: the file cannot be read.
    """
    mapped = map_file(path)
    header = decode_header(mapped[:HEADER_BYTES].tobytes(), path=path)
    mode_bytes = header.sequence_count
    sizes = {header.size_bytes + mode_bytes} if multimodal else {header.size_bytes, header.size_bytes + mode_bytes}
    if len(mapped) not in sizes:
        msg = (
            f"{path}: sequence_count {header.sequence_count} and document_count {header.document_count} "
            f"make {' or '.join(map(str, sorted(sizes)))} bytes{' with modes' if multimodal else ''}, "
            f"this file has {len(mapped)}"
        )
        raise FormatError(msg)
    return SequenceIndex(header, *_arrays(mapped, header, multimodal=multimodal))


def _arrays(
    mapped: npt.NDArray[np.uint8], header: Header, *, multimodal: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int8] | None]:
    count = header.sequence_count
    lengths_at = HEADER_BYTES
    pointers_at = lengths_at + 4 * count
    documents_at = pointers_at + 8 * count
    lengths = mapped[lengths_at:pointers_at].view("<i4")
    pointers = mapped[pointers_at:documents_at].view("<i8")
    documents = mapped[documents_at : header.size_bytes].view("<i8")
    modes = mapped[header.size_bytes : header.size_bytes + count].view(np.int8) if multimodal else None
    return lengths, pointers, documents, modes


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped read-only. The map lives as long as any array cut from it."""
    with path.open("rb") as file:
        file.seek(0, 2)
        if file.tell() == 0:
            return np.empty(0, dtype=np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
