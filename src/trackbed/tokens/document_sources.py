"""Sources of documents: `<prefix>.src`, the input file of each document and its place there (docs/formats/indexed.md).

Shapes: D documents, F input files.
"""

import array
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import Checksum, open_regular
from trackbed.tokens.seal import find_beside

SOURCES: Final = "src"
"""Name of the file beside a pair."""
UNKNOWN_FILE: Final = 2**32 - 1
"""Number of the file of a document whose source is not known."""
_MAGIC: Final = b"TBSRC\0\0\0"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sQQQ")
_STEP: Final = 1 << 18
_MOST_NAME_BYTES: Final = 1 << 30

Unit = Literal["byte", "row"]
"""What the places in a file count: bytes of the unpacked text, or rows of a table."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """An input file."""

    name: str
    """Path or address."""
    unit: Unit


@dataclass(frozen=True, slots=True)
class Source:
    """Where a document comes from."""

    name: str
    """Path or address of the input file."""
    unit: Unit
    place: int
    """First byte of its record in the unpacked text, or its row, from 0."""


class SourceColumns:
    """Sources of the documents of a pair that is being written.

    Args:
        num_unknown: documents before the first whose source is known.
    """

    def __init__(self, num_unknown: int = 0) -> None:
        self.files: list[SourceFile] = []
        self.numbers = array.array("I", [UNKNOWN_FILE]) * num_unknown
        self.places = array.array("q", [0]) * num_unknown
        self._known: dict[SourceFile, int] = {}

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.numbers)

    def add(self, files: Sequence[SourceFile], numbers: npt.NDArray[Any], places: npt.NDArray[Any]) -> None:
        """Appends the sources of documents.

        Args:
            files: input files, some of which may be known.
            numbers: `[D]` position of each document's file in `files`; `UNKNOWN_FILE` for none.
            places: `[D]` place in it.
        """
        own = np.array([self._number_of(one) for one in files], dtype=np.uint32)
        for start in range(0, len(numbers), _STEP):
            some = np.asarray(numbers[start : start + _STEP], dtype=np.uint32)
            is_known = some != UNKNOWN_FILE
            mapped = np.full(len(some), UNKNOWN_FILE, dtype=np.uint32)
            mapped[is_known] = own[some[is_known]]
            self.numbers.frombytes(mapped.tobytes())
            self.places.frombytes(np.asarray(places[start : start + _STEP], dtype=np.int64).tobytes())

    def add_unknown(self, count: int) -> None:
        """Appends documents whose source is not known."""
        self.numbers.extend(array.array("I", [UNKNOWN_FILE]) * count)
        self.places.extend(array.array("q", [0]) * count)

    def write(self, path: Path) -> Checksum:
        """Writes the new file `path`. Returns its checksum."""
        checksum = Checksum()
        with path.open("xb") as file:
            for part in self._parts():
                checksum.update(memoryview(part))
                file.write(part)
        return checksum

    def _parts(self) -> Iterator[bytes]:
        yield _HEADER.pack(_MAGIC, _VERSION, len(self), len(self.files))
        yield np.frombuffer(self.places, dtype=np.int64).astype("<i8", copy=False).tobytes()
        yield np.frombuffer(self.numbers, dtype=np.uint32).astype("<u4", copy=False).tobytes()
        yield json.dumps([[one.name, one.unit] for one in self.files]).encode()

    def _number_of(self, file: SourceFile) -> int:
        number = self._known.setdefault(file, len(self.files))
        if number == len(self.files):
            self.files.append(file)
        return number


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSources:
    """Sources of the documents of a pair. Arrays are mapped."""

    files: tuple[SourceFile, ...]
    """`[F]`"""
    numbers: npt.NDArray[np.uint32]
    """`[D]`"""
    places: npt.NDArray[np.int64]
    """`[D]`"""

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.numbers)

    def of(self, document: int) -> Source | None:
        """Returns the source of a document; None if it is not known.

        Raises:
            IndexError: there is no such document.
        """
        number = int(self.numbers[document])
        if number == UNKNOWN_FILE:
            return None
        file = self.files[number]
        return Source(file.name, file.unit, int(self.places[document]))

    @classmethod
    def open(cls, path_prefix: str) -> "DocumentSources | None":
        """Opens the sources of a pair; None if its seal names none, or it lies in an object store.

        Raises:
            FormatError: the file is damaged, or not the one that the seal names.
            FileNotFoundError: it is missing.
        """
        named = find_beside(path_prefix, SOURCES)
        if named is None:
            return None
        path, wanted, num_documents = named
        found = cls._read(path)
        size = path.stat().st_size
        if size != wanted.size_bytes or len(found) != num_documents:
            raise FormatError(
                f"{path}: the seal says {wanted.size_bytes} bytes and {num_documents} documents, found {size} and "
                f"{len(found)}"
            )
        return found

    @classmethod
    def _read(cls, path: Path) -> "DocumentSources":
        descriptor, size = open_regular(path)
        with open(descriptor, "rb") as file:  # noqa: PTH123  a descriptor
            header = file.read(_HEADER.size)
            magic, version, count, num_files = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0, 0)
            if (magic, version) != (_MAGIC, _VERSION):
                raise FormatError(f"{path}: must begin as version {_VERSION} of sources, found {header[:16]!r}")
            end = _HEADER.size + 12 * count
            if end > size or size - end > _MOST_NAME_BYTES:
                raise FormatError(f"{path}: {count} documents must have {12 * count} bytes, found {size} in the file")
            file.seek(end)
            files = _files_of(file.read(size - end), path)
        if len(files) != num_files:
            raise FormatError(f"{path}: must have the names of {num_files} files, found {len(files)}")
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        places = raw[_HEADER.size : _HEADER.size + 8 * count].view("<i8")
        numbers = raw[_HEADER.size + 8 * count : end].view("<u4")
        if count and int(places.min()) < 0:
            raise FormatError(
                f"{path}: document {int(places.argmin())} must have a place of at least 0, found {places.min()}"
            )
        wrong = np.flatnonzero((numbers >= num_files) & (numbers != UNKNOWN_FILE))
        if len(wrong):
            raise FormatError(
                f"{path}: document {wrong[0]} must have a file below {num_files}, found {numbers[wrong[0]]}"
            )
        return cls(files, numbers, places)


def check_sources(sources: SourceColumns, num_documents: int, *, where: str) -> None:
    """Checks that each document has a source.

    Raises:
        ArgumentError: they are not as many.
    """
    if len(sources) != num_documents:
        raise ArgumentError(f"{where}: each of {num_documents} documents must have a source, found {len(sources)}")


def _files_of(raw: bytes, path: Path) -> tuple[SourceFile, ...]:
    try:
        found = tuple(SourceFile(name, unit) for name, unit in json.loads(raw))
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"{path}: must end with names and units as JSON, found: {str(error)[:200]}") from None
    for one in found:
        if type(one.name) is not str or one.unit not in ("byte", "row"):
            raise FormatError(f"{path}: must end with names and units as JSON, found {str(one)[:200]}")
    return found
