"""Input files of preprocessing, and their formats: JSON lines, plain text or Parquet, optionally compressed."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Final, NoReturn

from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError
from trackbed.files.stores import Address, is_address, lost_address_hint
from trackbed.plural import number_of
from trackbed.preprocess.known_data import unread_name
from trackbed.preprocess.store_inputs import find_objects, stamps_of
from trackbed.preprocess.work_files import is_own_file, is_work_file

__all__ = ["FORMATS", "Compression", "InputFile", "InputFormat", "Inputs", "find_inputs"]

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
    """Address of an object; None for a file on a disk. The path of an object is that of its key."""

    @property
    def name(self) -> str:
        """Path or address."""
        return str(self.path) if self.address is None else self.address.text

    @property
    def is_packed(self) -> bool:
        """True if its stored bytes are not those of its text."""
        return self.compression is not Compression.NONE or self.format is InputFormat.PARQUET

    def with_absolute_path(self) -> "InputFile":
        """Returns the same input by a name that a process in another folder understands."""
        return self if self.address is not None else replace(self, path=self.path.absolute())


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files to read, and the number of files skipped in folders."""

    files: tuple[InputFile, ...]
    left_out: int
    """Number of files in folders whose suffix is not that of a format."""


def find_inputs(paths: Iterable[Path | str], *, input_format: InputFormat | None = None) -> Inputs:
    """Finds the input files that `paths` stand for, in order.

    A file stands for itself. A folder stands for the `.jsonl`, `.json`, `.txt`, `.md` and `.parquet` files in its
    whole tree, sorted by path; links to folders are not followed, and other files are counted. With `input_format`, a
    folder stands for every file in its tree. Files that Trackbed writes are never inputs: pairs, seals, and the work
    of unfinished runs. All formats but Parquet may be compressed, with `.gz` or `.zst` at the end of the name. An
    address stands for an object, or for the objects below it, sorted by the parts of their names.

    Args:
        paths: files and folders, and addresses of objects and of folders of objects.
        input_format: format of every file; None to take it from each file's suffix.

    Raises:
        ArgumentError: a path is neither a file nor a folder; a named file has an unknown suffix and `input_format` is
            None; a folder has no file to read; a Parquet file is compressed as a whole; or a library that reads an
            input is not installed.
        OSError: a folder cannot be read.
        StoreError: a store refuses, or does not answer in time.
    """
    found: list[InputFile] = []
    left_out = 0
    for name in paths:
        if is_address(name):
            inside = _objects_at(str(name), input_format)
            found += inside.files
            left_out += inside.left_out
            continue
        path = Path(name)
        if is_work_file(path):
            logger.warning("%s: skipped, as it holds the work of an unfinished run", path)
        elif path.is_dir():
            inside = _walk(path, input_format)
            found += inside.files
            left_out += inside.left_out
        else:
            found.append(_describe(path, input_format))
    if not found:
        msg = "inputs must name at least one file to read, found only the work of unfinished runs"
        raise ArgumentError(msg)
    return Inputs(tuple(found), left_out)


def _walk(folder: Path, input_format: InputFormat | None) -> Inputs:
    wanted, others = [], 0
    for directory, _, names in os.walk(folder, onerror=_refuse):
        for name in names:
            path = Path(directory, name)
            if is_own_file(path):
                continue
            if input_format is None and not _is_readable(*_kind(name)):
                others += 1
            else:
                wanted.append(path)
    if not wanted:
        kinds = f"files that end in {', '.join(_FORMATS_BY_SUFFIX)}" if input_format is None else "files to read"
        way = "; --format reads files of other names" if others else ""
        msg = f"{folder}: a folder must have {kinds}, found {number_of(others, 'other') if others else 'none'}{way}"
        raise ArgumentError(msg)
    return Inputs(tuple(_describe(path, input_format) for path in sorted(wanted)), others)


def _objects_at(text: str, wanted: InputFormat | None) -> Inputs:
    listed = find_objects(text)
    addresses = [one for one in listed.addresses if wanted is not None or _is_readable(*_kind(Path(one.key).name))]
    left_out = len(listed.addresses) - len(addresses)
    if not listed.is_folder:
        addresses, left_out = listed.addresses, 0
    if not addresses:
        msg = f"{text}: a folder must have files to read, found {number_of(left_out, 'other') if left_out else 'none'}"
        raise ArgumentError(msg)
    described = [(address, *_format_of(address.text, Path(address.key).name, wanted)) for address in addresses]
    return Inputs(
        tuple(
            InputFile(Path(address.key), input_format, stamp.size_bytes, compression, stamp.tag, address)
            for (address, input_format, compression), stamp in zip(described, stamps_of(addresses), strict=True)
        ),
        left_out,
    )


def _describe(path: Path, wanted: InputFormat | None) -> InputFile:
    if not path.is_file():
        state = "something else" if path.exists() else "nothing"
        msg = f"{path}: an input must be a file or a folder, found {state}{lost_address_hint(path)}"
        raise ArgumentError(msg)
    if is_own_file(path):
        msg = f"{path}: an input must hold texts, found a file of a tokenised pair"
        raise ArgumentError(msg)
    input_format, compression = _format_of(str(path), path.name, wanted)
    status = path.stat()
    return InputFile(path, input_format, status.st_size, compression, str(status.st_mtime_ns))


def _format_of(path: str, name: str, wanted: InputFormat | None) -> tuple[InputFormat, Compression]:
    """Returns format and compression of an input; checks that their libraries are installed."""
    named, compression = _kind(name)
    input_format = wanted or named
    if input_format is not None and not _is_readable(input_format, compression):
        msg = f"{path}: a Parquet file must not be compressed as a whole, found {compression.value}"
        raise ArgumentError(msg)
    unread = unread_name(name) if input_format is None else None
    if unread is not None:
        found, way = unread
        msg = f"{path}: an input must be JSON lines, plain text or Parquet, found the name of {found}: {way}"
        raise ArgumentError(msg)
    if input_format is None:
        known = ", ".join(_FORMATS_BY_SUFFIX)
        msg = f"{path}: a file name must end in {known}, found another; --format {'|'.join(FORMATS)} states the format"
        raise ArgumentError(msg)
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


def _refuse(error: OSError) -> NoReturn:
    raise error
