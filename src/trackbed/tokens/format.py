"""The `.idx` format, byte for byte (docs/formats/indexed.md).

Shapes: N sequences, D documents; the file holds D + 1 document borders.
"""

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import FormatError
from trackbed.files import (
    MAPS,
    RawIndexEnds,
    Stamp,
    check_stamp,
    let_go,
    map_readonly,
    open_regular,
    read_ahead,
    read_index_ends,
)
from trackbed.tokens.commit import interruption
from trackbed.tokens.dtype import DType

__all__ = [
    "HEADER_BYTES",
    "Header",
    "IndexEnds",
    "SequenceIndex",
    "encode_header",
    "explained",
    "is_indexed",
    "map_file",
    "open_index",
    "read_ends",
]

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
_FIELDS: Final = struct.Struct("<9sQBQQ")  # magic, version, dtype code, N, D + 1
HEADER_BYTES: Final = _FIELDS.size
_MOST_READ: Final = 1024
"""Files of a call: 8 MiB of what is read of them."""


class explained:  # noqa: N801  it is used like a function; a generator would take longer than the calls inside
    """Inside the block, an error of the system becomes one of Trackbed's that names the file, or else `path`."""

    __slots__ = ("_path",)

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, _class: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, OSError):
            where = error.filename or self._path
            msg = f"{where}: a pair must be two files that can be read, found: {error.strerror}"
            raise FormatError(msg) from error


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


def decode_header(raw: bytes | memoryview, *, path: str | Path) -> Header:
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


def is_indexed(path_prefix: str) -> bool:
    """True if there is an `.idx` of this prefix that begins as one of this format does."""
    try:
        if not Path(f"{path_prefix}.idx").is_file():
            return False
        with Path(f"{path_prefix}.idx").open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


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
        self.is_releasable = False
        """Whether the map may be dropped where there are too many: it is made again when it is needed."""
        self._multimodal = multimodal
        self._has_own_borders = False

    @cached_property
    def _mapped(self) -> npt.NDArray[np.uint8]:
        check_stamp(self.path, self.ends.stamp)
        with explained(self.path):
            mapped = map_file(self.path)
        if self.is_releasable:
            MAPS.use(self)  # not before: to make room for the map it might be released, and not be known again
        return mapped

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

    def release(self) -> bool:
        """Drop the map, to be made again when it is needed; arrays that were cut from it stay valid. Always True."""
        for name in ("_mapped", "sequence_lengths", "sequence_pointers", "sequence_modes", "document_indices"):
            if name != "document_indices" or not self._has_own_borders:
                vars(self).pop(name, None)
        return True

    def replace_document_indices(self, borders: npt.NDArray[np.int64]) -> None:
        """Use other document borders than those of the file."""
        self.document_indices = borders
        self._has_own_borders = True

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
        return self.ends.data_bytes


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
    changed_ns: int
    """Nanoseconds since 1970 at which the file last changed in any way; unlike the time of the last write, archives and
    `rsync -t` cannot set it."""

    @property
    def data_bytes(self) -> int:
        """Size that the `.bin` must have at least, from the last sequence; 0 without any."""
        return self.last_pointer + self.last_length * np.dtype(self.header.dtype).itemsize


def open_index(path: str | Path, *, multimodal: bool = False) -> SequenceIndex:
    """Open an `.idx` file. Costs neither time nor memory by sequence, and keeps no descriptor.

    Args:
        path: the file.
        multimodal: whether modes must be there; without it they are ignored.

    Raises:
        FormatError: the header is not one, or the file's size is not what its counts say.
        OSError: the file cannot be read.
    """
    (raw,) = read_index_ends([os.fsdecode(path)])
    while isinstance(raw, InterruptedError):  # by a signal that Python has seen to meanwhile
        (raw,) = read_index_ends([os.fsdecode(path)])
    if isinstance(raw, FileNotFoundError):
        hint = interruption(os.fsdecode(path).removesuffix(".idx"))
        raise FileNotFoundError(raw.errno, f"{raw.strerror}{hint}", raw.filename)
    if isinstance(raw, OSError):
        raise raw
    return SequenceIndex(path, _ends_of(raw, path, multimodal=multimodal), multimodal=multimodal)


def read_ends(paths: Sequence[str], *, num_threads: int = 1) -> Iterator[IndexEnds | None]:
    """What opening each `.idx` file finds out; None of one that cannot be opened: `open_index` says why.

    Args:
        paths: the files.
        num_threads: how many are read at once.
    """
    for first in range(0, len(paths), _MOST_READ):
        some = paths[first : first + _MOST_READ]
        for path, raw in zip(some, read_index_ends(some, num_threads=num_threads), strict=True):
            try:
                yield None if isinstance(raw, OSError) else _ends_of(raw, path, multimodal=False)
            except FormatError:
                yield None


def _ends_of(raw: RawIndexEnds, path: str | Path, *, multimodal: bool) -> IndexEnds:
    header = decode_header(raw.head[:HEADER_BYTES], path=path)
    stamp = Stamp(*raw.stamp)
    mode_bytes = header.sequence_count
    sizes = {header.size_bytes + mode_bytes} if multimodal else {header.size_bytes, header.size_bytes + mode_bytes}
    if stamp.size_bytes not in sizes:
        msg = (
            f"{path}: sequence_count {header.sequence_count} and document_count {header.document_count} "
            f"make {' or '.join(map(str, sorted(sizes)))} bytes{' with modes' if multimodal else ''}, "
            f"this file has {stamp.size_bytes}"
        )
        raise FormatError(msg)
    return IndexEnds(
        header=header,
        size_bytes=stamp.size_bytes,
        sha256=hashlib.sha256(raw.ends).hexdigest(),
        last_length=raw.last_length,
        last_pointer=raw.last_pointer,
        last_border=raw.last_border,
        stamp=stamp,
        changed_ns=raw.changed_ns,
    )


def map_file(path: str | Path) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped read-only. The map lives as long as any array cut from it."""
    descriptor, size = open_regular(path)
    try:
        return map_readonly(descriptor, size)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
