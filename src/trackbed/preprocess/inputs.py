"""Input files of preprocessing, their formats, and the segments of files that workers read records from.

Formats are JSON lines, plain text and Parquet, the first two optionally compressed.
"""

import logging
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Final

from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError
from trackbed.files.stores import Address, is_address, lost_address_hint
from trackbed.plural import number_of
from trackbed.preprocess.find_inputs import (
    FolderWalk,
    LeftOut,
    Reason,
    contents_of,
    dead_link,
    find_objects,
    is_own_file,
    is_work_file,
    stamps_of,
)
from trackbed.preprocess.known_data import MAX_POINTER_BYTES, MIN_POINTER_BYTES, refuse_pointer, unread_name

logger = logging.getLogger(__name__)


class InputFormat(Enum):
    """Format of an input file."""

    JSON_LINES = "jsonl"
    """One JSON object per line."""
    PLAIN_TEXT = "text"
    """The whole file is one document."""
    PARQUET = "parquet"
    """Columns of strings, one document per row."""


class Compression(Enum):
    """Compression of an input file; the value is the suffix of its name."""

    NONE = ""
    GZIP = ".gz"
    ZSTANDARD = ".zst"


_FORMATS_BY_SUFFIX: Final = {
    ".jsonl": InputFormat.JSON_LINES,
    ".json": InputFormat.JSON_LINES,
    ".txt": InputFormat.PLAIN_TEXT,
    ".md": InputFormat.PLAIN_TEXT,
    ".parquet": InputFormat.PARQUET,
}
_COMPRESSIONS: Final = {
    compression.value: compression for compression in Compression if compression is not Compression.NONE
}

FORMATS: Final = {"jsonl": InputFormat.JSON_LINES, "txt": InputFormat.PLAIN_TEXT, "parquet": InputFormat.PARQUET}
"""Formats by the names that callers use."""

FORMAT_NAMES: Final = {
    InputFormat.JSON_LINES: "JSON lines",
    InputFormat.PLAIN_TEXT: "text",
    InputFormat.PARQUET: "Parquet",
}
"""Formats as reports name them."""

_NAMES_SHOWN: Final = 3

FileIdentity = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file, with its size at planning time."""

    path: Path
    format: InputFormat
    size_bytes: int
    compression: Compression = Compression.NONE
    version: str = field(default="", compare=False)
    """Modification time in nanoseconds, or tag of the object, at planning time: changes when it is written again."""
    address: Address | None = None
    """Address of an object; None for a file on a disk. The path of an object is its key."""
    identity: FileIdentity | None = field(default=None, compare=False)
    """Device, inode, size and modification time of a file on a disk: the same under each of its names."""

    @property
    def name(self) -> str:
        """Path or address."""
        return str(self.path) if self.address is None else self.address.text

    @property
    def is_packed(self) -> bool:
        """True if its stored bytes are not its text's."""
        return self.compression is not Compression.NONE or self.format is InputFormat.PARQUET

    def with_absolute_path(self) -> "InputFile":
        """Returns the same input by a name that a process in another folder understands."""
        return self if self.address is not None else replace(self, path=self.path.absolute())


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files to read, and the names that were left out."""

    files: tuple[InputFile, ...]
    skipped: tuple[LeftOut, ...] = ()

    @property
    def left_out(self) -> int:
        """Number of files in folders whose suffix is of no known format."""
        return sum(one.reason is Reason.UNKNOWN_SUFFIX for one in self.skipped)

    def names_by_format(self) -> dict[str, tuple[str, ...]]:
        """Returns the names of the files of each format, the most frequent format first."""
        names: dict[str, list[str]] = {}
        for file in self.files:
            names.setdefault(file.format.value, []).append(file.name)
        return {name: tuple(found) for name, found in sorted(names.items(), key=lambda item: -len(item[1]))}


def find_inputs(paths: Iterable[Path | str], *, input_format: InputFormat | None = None) -> Inputs:
    """Finds the input files that `paths` stand for, in order.

    A file stands for itself. A folder stands for the `.jsonl`, `.json`, `.txt`, `.md` and `.parquet` files in its
    whole tree, sorted by path; links are followed. With `input_format`, it stands for every file in its tree. Below a
    folder, names that begin with `.` or `_` are left out, and so are the files that Trackbed writes: pairs, seals, and
    the work of unfinished runs. A file that has several names, or is given twice, is read once, under the first name.
    All formats but Parquet may be compressed, with `.gz` or `.zst` at the end of the name. An address stands for an
    object, or for the objects below it, sorted by the parts of their names.

    Args:
        paths: files and folders, and addresses of objects and of folders of objects.
        input_format: format of every file; None to take it from each file's suffix.
    """
    walk = FolderWalk()
    files: list[InputFile] = []
    skipped: list[LeftOut] = []
    seen: set[Hashable] = set()
    for name in paths:
        given, is_folder = _inputs_at(name, input_format, walk)
        first = len(files)
        skipped += given.skipped
        for file in given.files:
            identity = _identity_of(file)
            if identity in seen:
                skipped.append(LeftOut(file.name, Reason.GIVEN_TWICE))
            else:
                seen.add(identity)
                files.append(file)
        if is_folder:
            _tell_if_mixed(str(name), files[first:])
    if not files:
        loops = any(one.reason is Reason.GIVEN_TWICE for one in skipped)
        what = "links to the folders that hold them" if loops else "the work of unfinished runs"
        raise ArgumentError(f"inputs must name at least one file to read, found only {what}")
    return Inputs(tuple(files), tuple(skipped))


def _inputs_at(name: Path | str, input_format: InputFormat | None, walk: FolderWalk) -> tuple[Inputs, bool]:
    """Returns the inputs that one path or address stands for; the flag is True for a folder."""
    if is_address(name):
        return _objects_at(str(name), input_format, walk)
    path = Path(name)
    if is_work_file(path):
        logger.warning("%s: skipped, as it holds the work of an unfinished run", path)
        return Inputs((), (LeftOut(str(path), Reason.WRITTEN_BY_TRACKBED),)), False
    if path.is_dir():
        return _files_below(path, input_format, walk), True
    return Inputs((_describe(path, input_format),)), False


def _files_below(folder: Path, input_format: InputFormat | None, walk: FolderWalk) -> Inputs:
    files, skipped = walk.files_below(folder)
    paths = []
    for path in files:
        if is_own_file(path):
            skipped.append(LeftOut(str(path), Reason.WRITTEN_BY_TRACKBED))
        elif input_format is None and not _is_readable(*_kind(path.name)):
            skipped.append(LeftOut(str(path), Reason.UNKNOWN_SUFFIX))
        else:
            paths.append(path)
    if not paths and not any(one.reason is Reason.GIVEN_TWICE for one in skipped):
        kinds = f"files that end in {', '.join(_FORMATS_BY_SUFFIX)}" if input_format is None else "files to read"
        raise ArgumentError(f"{folder}: a folder must have {kinds}, found {_listed(skipped)}")
    return Inputs(tuple(_describe(path, input_format) for path in paths), tuple(skipped))


def _objects_at(text: str, asked_format: InputFormat | None, walk: FolderWalk) -> tuple[Inputs, bool]:
    """Returns the inputs at an address; the flag is True for a folder of objects."""
    listed = find_objects(text, walk)
    addresses, skipped = [], list(listed.left_out)
    for listed_address in listed.addresses:
        if listed.is_folder and asked_format is None and not _is_readable(*_kind(Path(listed_address.key).name)):
            skipped.append(LeftOut(listed_address.text, Reason.UNKNOWN_SUFFIX))
        else:
            addresses.append(listed_address)
    if not addresses and not any(left_out.reason is Reason.GIVEN_TWICE for left_out in skipped):
        raise ArgumentError(f"{text}: a folder must have files to read, found {_listed(skipped)}")
    described = [(address, *_format_of(address.text, Path(address.key).name, asked_format)) for address in addresses]
    stamps = list(stamps_of(addresses))
    small = [
        (address, stamp) for address, stamp in zip(addresses, stamps, strict=True) if _may_be_pointer(stamp.size_bytes)
    ]
    for (address, _), content in zip(small, contents_of(small), strict=True):
        refuse_pointer(address.text, content)
    files = tuple(
        InputFile(Path(address.key), input_format, stamp.size_bytes, compression, stamp.tag, address)
        for (address, input_format, compression), stamp in zip(described, stamps, strict=True)
    )
    return Inputs(files, tuple(skipped)), listed.is_folder


def _describe(path: Path, asked_format: InputFormat | None) -> InputFile:
    if not path.is_file():
        if path.is_symlink() and not path.exists():
            raise dead_link(path)
        state = "something else" if path.exists() else "nothing"
        raise ArgumentError(f"{path}: an input must be a file or a folder, found {state}{lost_address_hint(path)}")
    if is_own_file(path):
        raise ArgumentError(f"{path}: an input must hold texts, found a file of a tokenised pair")
    input_format, compression = _format_of(str(path), path.name, asked_format)
    status = path.stat()
    if _may_be_pointer(status.st_size):
        refuse_pointer(str(path), path.read_bytes())
    return InputFile(path, input_format, status.st_size, compression, str(status.st_mtime_ns), identity=_stamp(status))


def _identity_of(file: InputFile) -> Hashable:
    """Value that two names of one file or object have in common."""
    if file.address is None:
        return file.identity
    return _stamp(file.path.stat()) if file.address.scheme == "file" else file.address[1:]


def _stamp(status: os.stat_result) -> FileIdentity:
    # Size and time too, as some file systems make inodes up, and give two files the same one.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _may_be_pointer(size_bytes: int) -> bool:
    return MIN_POINTER_BYTES <= size_bytes <= MAX_POINTER_BYTES


def _listed(skipped: list[LeftOut]) -> str:
    """Returns the number of names that a folder has instead of inputs, and the way on."""
    counts = Counter(one.reason for one in skipped)
    others = counts[Reason.UNKNOWN_SUFFIX]
    found = [number_of(others, "other")] if others else []
    if counts[Reason.HIDDEN]:
        found.append(f"{counts[Reason.HIDDEN]} hidden, whose names begin with . or _")
    way = "; --format reads files of other names" if others else ""
    way += "; hidden ones are read where they are named" if counts[Reason.HIDDEN] else ""
    return (" and ".join(found) or "none") + way


def _tell_if_mixed(folder: str, files: Sequence[InputFile]) -> None:
    """Logs the plain texts of a folder that has files of records too: a note beside the data looks like that."""
    texts = [file for file in files if file.format is InputFormat.PLAIN_TEXT]
    if not texts or len(texts) == len(files):
        return
    formats = {file.format for file in files} - {InputFormat.PLAIN_TEXT}
    records = " and ".join(name for kind, name in FORMAT_NAMES.items() if kind in formats)
    names = ", ".join(file.name for file in texts[:_NAMES_SHOWN])
    more = f" and {len(texts) - _NAMES_SHOWN} more" if len(texts) > _NAMES_SHOWN else ""
    logger.warning(
        "%s: has %s beside %s of %s, and each becomes a document: %s%s; name the files to read if that is not wanted",
        folder,
        number_of(len(texts), "plain text"),
        number_of(len(files) - len(texts), "file"),
        records,
        names,
        more,
    )


def _format_of(path: str, name: str, wanted: InputFormat | None) -> tuple[InputFormat, Compression]:
    """Returns format and compression of an input; checks that their libraries are installed."""
    named, compression = _kind(name)
    input_format = wanted or named
    if input_format is not None and not _is_readable(input_format, compression):
        raise ArgumentError(f"{path}: a Parquet file must not be compressed as a whole, found {compression.value}")
    unread = unread_name(name) if input_format is None else None
    if unread is not None:
        found, way = unread
        raise ArgumentError(
            f"{path}: an input must be JSON lines, plain text or Parquet, found the name of {found}: {way}"
        )
    if input_format is None:
        known = ", ".join(_FORMATS_BY_SUFFIX)
        raise ArgumentError(
            f"{path}: a file name must end in {known}, found another; --format {'|'.join(FORMATS)} states the format"
        )
    if compression is Compression.ZSTANDARD:
        require("zstandard", where=path)
    if input_format is InputFormat.PARQUET:
        require("pyarrow", where=path)
    return input_format, compression


def _kind(name: str) -> tuple[InputFormat | None, Compression]:
    """Parses format and compression from the end of a file name; the format is None if the suffix is unknown.

    >>> _kind("web.jsonl.gz")
    (<InputFormat.JSON_LINES: 'jsonl'>, <Compression.GZIP: '.gz'>)
    """
    path = Path(name)
    compression = _COMPRESSIONS.get(path.suffix.lower(), Compression.NONE)
    bare = name if compression is Compression.NONE else name[: -len(path.suffix)]
    return _FORMATS_BY_SUFFIX.get(Path(bare).suffix.lower()), compression


def _is_readable(input_format: InputFormat | None, compression: Compression) -> bool:
    return input_format is not None and (input_format is not InputFormat.PARQUET or compression is Compression.NONE)


@dataclass(frozen=True, slots=True)
class InputSegment:
    """The lines that start in bytes `[start, stop)` of a file; for a plain text, the whole file.

    Planning such ranges needs no search for line ends: the reader of a segment starts after the first line end at or
    after `start - 1`, and continues to the end of its last line.
    """

    file: InputFile
    start: int
    stop: int

    @property
    def text_bytes(self) -> int:
        """Estimate of the work, in bytes of text."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class TextBlock(InputSegment):
    """Whole lines of a compressed file, or all of its text. `[start, stop)` are the compressed bytes that it covers."""

    text: bytes
    first_byte: int = 0
    """Place of the text in that of the whole file."""

    @property
    def text_bytes(self) -> int:
        """Bytes of the text."""
        return len(self.text)


@dataclass(frozen=True, slots=True)
class LongRecord(InputSegment):
    """A line or plain text of a compressed file that exceeds the record limit. Its text was skipped."""

    @property
    def text_bytes(self) -> int:
        """Always 0, as there is nothing to tokenise."""
        return 0


@dataclass(frozen=True, slots=True)
class RowGroup(InputSegment):
    """Rows of a Parquet file. `[start, stop)` is a share of the file size, proportional to the size of the group."""

    number: int
    """Index of the row group in its file."""
    uncompressed_bytes: int
    """Uncompressed size of all columns of the group."""
    first_row: int = 0
    """Rows of the file before the group."""

    @property
    def text_bytes(self) -> int:
        """Bytes of all columns, an upper bound on the bytes of the requested columns."""
        return self.uncompressed_bytes
