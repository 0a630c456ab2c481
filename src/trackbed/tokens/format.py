"""The `.idx` format, byte for byte (docs/formats/indexed.md), and the identity of a pair.

Shapes: N sequences, D documents; the file holds D + 1 document borders.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import FormatError
from trackbed.files import (
    MAPS,
    RawIndexEnds,
    Stamp,
    check_stamp,
    drop_pages,
    map_readonly,
    open_regular,
    read_ahead,
    read_index_ends,
)
from trackbed.files.stores import ObjectStamp
from trackbed.tokens.commit import interruption
from trackbed.tokens.idx_header import HEADER_BYTES, MAGIC, Header, checksum_lengths, decode_header
from trackbed.tokens.paths import get_bin_path, get_idx_path
from trackbed.tokens.stored.index_cache import StoredIndex

_MOST_READ: Final = 1024
"""Files per kernel call, which limits its buffers to 8 MiB."""


class as_format_error:  # noqa: N801  used like a function; a generator would take longer than the calls inside
    """Context manager that converts an OSError to a FormatError naming the file, or `path` if the error names none."""

    __slots__ = ("_path",)

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, _class: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, OSError):
            where = error.filename or self._path
            raise FormatError(f"{where}: both files of a pair must be readable, found: {error.strerror}") from error


def is_indexed(path_prefix: str) -> bool:
    """True if there is an `.idx` of this prefix that begins with the magic of this format."""
    try:
        if not Path(f"{path_prefix}.idx").is_file():
            return False
        with Path(f"{path_prefix}.idx").open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


class SequenceIndex:
    """The arrays of an `.idx`: views of one memory map, which is created on first use.

    Args:
        path: the file.
        ends: metadata read when the file was opened.
        multimodal: True to read the modes of sequences.
        stored: the object, if `path` is the address of one; None for a file.
    """

    def __init__(
        self,
        path: str | Path,
        ends: "IndexEnds",
        *,
        multimodal: bool,
        stored: StoredIndex | None = None,
    ) -> None:
        self.dtype = ends.header.dtype
        self.dtype_size = np.dtype(ends.header.dtype).itemsize
        self.sequence_count = ends.header.sequence_count
        self.document_count = ends.header.document_count
        self.ends = ends
        self.path = path
        self.is_releasable = False
        """True if the map may be released when too many are open; it is created again on next use."""
        self._multimodal = multimodal
        self.stored = stored
        self._has_own_borders = False

    def reopened(self, *, multimodal: bool = False) -> "SequenceIndex":
        """Returns the same index with a map of its own, for one read; with modes if `multimodal`."""
        return SequenceIndex(self.path, self.ends, multimodal=multimodal, stored=self.stored)

    def local_path(self) -> str | Path:
        """Returns the path of the file, or of the copy of the object, which is fetched first if there is none.

        Raises:
            FormatError: another file has taken its place.
        """
        if isinstance(self.ends.stamp, Stamp):
            check_stamp(self.path, self.ends.stamp)
            return self.path
        return self.path if self.stored is None else self.stored.fetch(self.ends.stamp)

    @cached_property
    def _mapped(self) -> npt.NDArray[np.uint8]:
        path = self.local_path()
        with as_format_error(self.path):
            mapped = map_file(path)
        if self.is_releasable:
            MAPS.use(self)  # after mapping, which may release this object to stay within the limit
        return mapped

    def map(self) -> None:
        """Maps the file now, so that later reads see its current content."""
        _ = self._mapped

    @property
    def mapped(self) -> npt.NDArray[np.uint8]:
        """The bytes of the file."""
        return self._mapped

    def read_ahead(self, start: int, stop: int) -> None:
        """Starts reading the lengths of sequences `[start, stop)` in the background, up to 8 million of them."""
        read_ahead(self.sequence_lengths[start:stop])

    def drop_pages(self) -> None:
        """Free the memory of pages that were read, if the file is mapped."""
        if "_mapped" in vars(self):
            drop_pages(self._mapped)

    def release(self) -> bool:
        """Drops the map, which is created again on next use. Arrays cut from it stay valid. Always returns True."""
        for name in ("_mapped", "sequence_lengths", "sequence_pointers", "sequence_modes", "document_indices"):
            if name != "document_indices" or not self._has_own_borders:
                vars(self).pop(name, None)
        return True

    def replace_document_indices(self, borders: npt.NDArray[np.int64]) -> None:
        """Replace the document borders of the file."""
        self.document_indices = borders
        self.document_count = len(borders)
        self._has_own_borders = True

    @cached_property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """`[N]` tokens in each sequence."""
        return self._mapped[HEADER_BYTES : self.ends.header.pointers_at].view("<i4")

    def checksum_lengths(self) -> str:
        """Returns the CRC-32 of all lengths; the copy of an object keeps it, so that they are not read again."""
        if self.stored is not None and isinstance(self.ends.stamp, ObjectStamp):
            return self.stored.checksum_lengths(self.ends.stamp)
        return checksum_lengths(self.sequence_lengths)

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
        """Minimum size of the `.bin`: the end of the last sequence, or 0 without sequences."""
        return self.ends.data_bytes


@dataclass(frozen=True, slots=True)
class IndexEnds:
    """Metadata read when an `.idx` is opened: a few bytes from its start and its end."""

    header: Header
    size_bytes: int
    sha256: str
    """SHA-256 of the header and of the first and last 4 KiB."""
    last_length: int
    """Tokens in the last sequence, 0 without sequences."""
    last_pointer: int
    """Byte offset of the last sequence, 0 without sequences."""
    last_border: int
    """The last document border, which must be N."""
    stamp: Stamp | ObjectStamp
    """Identity of the file or object: another one that takes its place has another stamp."""
    changed_ns: int
    """Nanoseconds since 1970 at which the file last changed in any way; unlike the time of the last write, archives and
    `rsync -t` cannot set it. 0 for an object."""

    @property
    def data_bytes(self) -> int:
        """Minimum size of the `.bin`: the end of the last sequence, or 0 without sequences."""
        return self.last_pointer + self.last_length * np.dtype(self.header.dtype).itemsize


class PairHeader(NamedTuple):
    """Result of opening a pair: what its files say, and which files they are."""

    ends: IndexEnds
    bin_stamp: Stamp | ObjectStamp


def open_index(path: str | Path, *, multimodal: bool = False) -> SequenceIndex:
    """Opens an `.idx` file. Time and memory do not depend on the number of sequences, and no descriptor stays open.

    Args:
        path: the file.
        multimodal: True to require modes; if False, modes are ignored.

    Raises:
        FormatError: the header is invalid, or the size of the file does not match its counts.
        OSError: the file cannot be read.
    """
    (raw,) = read_index_ends([os.fsdecode(path)])
    while isinstance(raw, InterruptedError):  # by a signal, whose handler has already run
        (raw,) = read_index_ends([os.fsdecode(path)])
    if isinstance(raw, FileNotFoundError):
        hint = interruption(os.fsdecode(path).removesuffix(".idx"))
        raise FileNotFoundError(raw.errno, f"{raw.strerror}{hint}", raw.filename)
    if isinstance(raw, OSError):
        raise raw
    return SequenceIndex(path, ends_of(raw, path, multimodal=multimodal), multimodal=multimodal)


def read_ends(paths: Sequence[str], *, num_threads: int = 1) -> Iterator[IndexEnds | None]:
    """Reads the metadata of many `.idx` files; None for a file that cannot be opened, where `open_index` raises.

    Args:
        paths: the files.
        num_threads: number of files read concurrently.
    """
    for first in range(0, len(paths), _MOST_READ):
        some = paths[first : first + _MOST_READ]
        for path, raw in zip(some, read_index_ends(some, num_threads=num_threads), strict=True):
            try:
                yield None if isinstance(raw, OSError) else ends_of(raw, path)
            except FormatError:
                yield None


def ends_of(
    raw: RawIndexEnds, path: str | Path, *, multimodal: bool = False, stamp: ObjectStamp | None = None
) -> IndexEnds:
    """Decodes the metadata of an `.idx`.

    Args:
        raw: what was read of it.
        path: its path or address.
        multimodal: True to require modes.
        stamp: identity of an object; None for a file, whose identity `raw` has.
    """
    header = decode_header(raw.head[:HEADER_BYTES], path=path)
    identity = stamp or Stamp(*raw.stamp)
    mode_bytes = header.sequence_count
    sizes = {header.size_bytes + mode_bytes} if multimodal else {header.size_bytes, header.size_bytes + mode_bytes}
    if identity.size_bytes not in sizes:
        raise FormatError(
            f"{path}: sequence_count {header.sequence_count} and document_count {header.document_count} "
            f"make {' or '.join(map(str, sorted(sizes)))} bytes{' with modes' if multimodal else ''}, "
            f"this file has {identity.size_bytes}"
        )
    return IndexEnds(
        header=header,
        size_bytes=identity.size_bytes,
        sha256=hashlib.sha256(raw.ends).hexdigest(),
        last_length=raw.last_length,
        last_pointer=raw.last_pointer,
        last_border=raw.last_border,
        stamp=identity,
        changed_ns=0 if stamp else raw.changed_ns,
    )


def map_file(path: str | Path, *, may_read: bool = True) -> npt.NDArray[np.uint8]:
    """Maps the bytes of a file read-only. The map lives as long as any array cut from it.

    Args:
        path: path of the file.
        may_read: False for an error where the system refuses the map; by default the file is read into memory.
    """
    descriptor, size = open_regular(path)
    try:
        return map_readonly(descriptor, size, may_read=may_read)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def identity(path_prefix: str) -> dict[str, Any]:
    """Sizes of both files, and the SHA-256 of the index's header and of its first and last 4 KiB.

    Contains no times, so a copied corpus has the same identity. The cost does not depend on the size of the files.

    Raises:
        FormatError: the index is damaged.
        OSError: one of the files cannot be read.
    """
    bin_bytes = os.stat(get_bin_path(path_prefix)).st_size  # noqa: PTH116  thousands of pairs are opened
    return identity_of(open_index(Path(get_idx_path(path_prefix))), bin_bytes=bin_bytes)


def identity_of(index: SequenceIndex, *, bin_bytes: int) -> dict[str, Any]:
    """Identity of a pair whose index is already open."""
    return {"bin_bytes": bin_bytes, "idx_bytes": index.ends.size_bytes, "idx_ends_sha256": index.ends.sha256}
