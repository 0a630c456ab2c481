"""Which files are read, and as what: JSON lines, plain text or Parquet, as they are or packed."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NoReturn

from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError
from trackbed.tokens import get_seal_path

__all__ = ["InputFile", "Layout", "Packing", "find_inputs"]


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
_SEAL_SUFFIX: Final = get_seal_path("")


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, and how large it was when the work was planned."""

    path: Path
    layout: Layout
    size_bytes: int
    packing: Packing = Packing.NONE


def find_inputs(paths: Iterable[Path]) -> list[InputFile]:
    """The files that `paths` stand for, in order.

    A folder stands for the `.jsonl`, `.json`, `.txt`, `.md` and `.parquet` files in it and below, sorted by path,
    without the seals of indexed files; links to folders are not followed. A file that is named stands for itself,
    plain text unless its name says otherwise. All but `.parquet` may be packed: then `.gz` or `.zst` follows.

    Raises:
        ArgumentError: a path is neither a file nor a folder, or a folder has no such file; or a library that
            reads such a file is not installed.
        OSError: a folder cannot be read.
    """
    found = []
    for path in paths:
        if path.is_dir():
            found.extend(_walk(path))
        else:
            found.append(_describe(path))
    return found


def _walk(folder: Path) -> list[InputFile]:
    paths = []
    for directory, _, names in os.walk(folder, onerror=_refuse):
        paths += [
            Path(directory, name) for name in names if _kind(name)[0] is not None and not name.endswith(_SEAL_SUFFIX)
        ]
    if not paths:
        msg = f"{folder}: a folder must have files that end in {', '.join(_LAYOUTS)}, found none"
        raise ArgumentError(msg)
    return [_describe(path) for path in sorted(paths)]


def _describe(path: Path) -> InputFile:
    if not path.is_file():
        state = "something else" if path.exists() else "nothing"
        msg = f"{path}: an input must be a file or a folder, found {state}"
        raise ArgumentError(msg)
    layout, packing = _kind(path.name)
    if packing is Packing.ZSTANDARD:
        require("zstandard", where=path)
    if layout is Layout.PARQUET:
        require("pyarrow", where=path)
    return InputFile(path, layout or Layout.PLAIN_TEXT, path.stat().st_size, packing)


def _kind(name: str) -> tuple[Layout | None, Packing]:
    """What the end of a file's name says of it; no layout where it says nothing.

    >>> _kind("web.jsonl.gz")
    (<Layout.JSON_LINES: 'jsonl'>, <Packing.GZIP: '.gz'>)
    """
    path = Path(name)
    packing = _PACKINGS.get(path.suffix.lower(), Packing.NONE)
    layout = _LAYOUTS.get((path if packing is Packing.NONE else path.with_suffix("")).suffix.lower())
    if layout is Layout.PARQUET and packing is not Packing.NONE:
        return None, packing
    return layout, packing


def _refuse(error: OSError) -> NoReturn:
    raise error
