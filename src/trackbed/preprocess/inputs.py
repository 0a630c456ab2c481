"""Which files are read, and as what: JSON lines, plain text or Parquet, as they are or packed."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NoReturn

from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError
from trackbed.preprocess.work_files import is_own_file, is_work_file

__all__ = ["FORMATS", "InputFile", "Inputs", "Layout", "Packing", "find_inputs"]

logger = logging.getLogger(__name__)


class Layout(Enum):
    """How a file holds its documents."""

    JSON_LINES = "jsonl"
    """One JSON object a line."""
    PLAIN_TEXT = "text"
    """The whole file is one document."""
    PARQUET = "parquet"
    """Columns of strings, a document in each row."""


class Packing(Enum):
    """How the bytes of a file are packed; the value is the end of its name."""

    NONE = ""
    GZIP = ".gz"
    ZSTANDARD = ".zst"


_LAYOUTS: Final = {
    ".jsonl": Layout.JSON_LINES,
    ".json": Layout.JSON_LINES,
    ".txt": Layout.PLAIN_TEXT,
    ".md": Layout.PLAIN_TEXT,
    ".parquet": Layout.PARQUET,
}
_PACKINGS: Final = {packing.value: packing for packing in Packing if packing is not Packing.NONE}

FORMATS: Final = {"jsonl": Layout.JSON_LINES, "txt": Layout.PLAIN_TEXT, "parquet": Layout.PARQUET}
"""The layouts by the names that a caller gives them."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, and how large it was when the work was planned."""

    path: Path
    layout: Layout
    size_bytes: int
    packing: Packing = Packing.NONE


@dataclass(frozen=True, slots=True)
class Inputs:
    """The files to read, and what was passed over to find them."""

    files: tuple[InputFile, ...]
    left_out: int
    """Files in folders whose suffix names no layout."""


def find_inputs(paths: Iterable[Path], *, layout: Layout | None = None) -> Inputs:
    """Finds the files that `paths` stand for, in order.

    A named file stands for itself. A folder stands for the `.jsonl`, `.json`, `.txt`, `.md` and `.parquet` files in it
    and below, sorted by path; links to folders are not followed, other files are counted. With `layout` a folder stands
    for every file in it and below. Files that Trackbed writes are never inputs: pairs, seals, and the work of a run
    that has not ended. All but Parquet may be packed: then `.gz` or `.zst` ends the name.

    Args:
        paths: files and folders.
        layout: how every file holds its documents; None to take it from each file's suffix.

    Raises:
        ArgumentError: a path is neither a file nor a folder; a named file has an unknown suffix and there is no
            `layout`; a folder has no file to read; a Parquet file is packed; or a library that reads an input is not
            installed.
        OSError: a folder cannot be read.
    """
    found: list[InputFile] = []
    left_out = 0
    for path in paths:
        if is_work_file(path):
            logger.warning("%s: left out, as it holds the work of a run that has not ended", path)
        elif path.is_dir():
            inside = _walk(path, layout)
            found += inside.files
            left_out += inside.left_out
        else:
            found.append(_describe(path, layout))
    if not found:
        msg = "inputs must name at least one file to read, found none but the work of runs that have not ended"
        raise ArgumentError(msg)
    return Inputs(tuple(found), left_out)


def _walk(folder: Path, layout: Layout | None) -> Inputs:
    wanted, others = [], 0
    for directory, _, names in os.walk(folder, onerror=_refuse):
        for name in names:
            path = Path(directory, name)
            if is_own_file(path):
                continue
            if layout is None and not _is_readable(*_kind(name)):
                others += 1
            else:
                wanted.append(path)
    if not wanted:
        kinds = f"files that end in {', '.join(_LAYOUTS)}" if layout is None else "files to read"
        way = "; --format reads files of other names" if others else ""
        msg = f"{folder}: a folder must have {kinds}, found {f'{others} others' if others else 'none'}{way}"
        raise ArgumentError(msg)
    return Inputs(tuple(_describe(path, layout) for path in sorted(wanted)), others)


def _describe(path: Path, wanted: Layout | None) -> InputFile:
    if not path.is_file():
        state = "something else" if path.exists() else "nothing"
        msg = f"{path}: an input must be a file or a folder, found {state}"
        raise ArgumentError(msg)
    named, packing = _kind(path.name)
    layout = wanted or named
    if is_own_file(path):
        msg = f"{path}: an input must hold texts, found a file of a tokenised pair"
        raise ArgumentError(msg)
    if layout is not None and not _is_readable(layout, packing):
        msg = f"{path}: a Parquet file must not be packed once more, found {packing.value}"
        raise ArgumentError(msg)
    if layout is None:
        known = ", ".join(_LAYOUTS)
        msg = f"{path}: a file must end in {known}, found another name; --format {'|'.join(FORMATS)} says what it is"
        raise ArgumentError(msg)
    if packing is Packing.ZSTANDARD:
        require("zstandard", where=path)
    if layout is Layout.PARQUET:
        require("pyarrow", where=path)
    return InputFile(path, layout, path.stat().st_size, packing)


def _kind(name: str) -> tuple[Layout | None, Packing]:
    """Reads layout and packing from the end of a file's name; the layout is None where the suffix is unknown.

    >>> _kind("web.jsonl.gz")
    (<Layout.JSON_LINES: 'jsonl'>, <Packing.GZIP: '.gz'>)
    """
    path = Path(name)
    packing = _PACKINGS.get(path.suffix.lower(), Packing.NONE)
    bare = name if packing is Packing.NONE else name[: -len(path.suffix)]
    return _LAYOUTS.get(Path(bare).suffix.lower()), packing


def _is_readable(layout: Layout | None, packing: Packing) -> bool:
    return layout is not None and (layout is not Layout.PARQUET or packing is Packing.NONE)


def _refuse(error: OSError) -> NoReturn:
    raise error
