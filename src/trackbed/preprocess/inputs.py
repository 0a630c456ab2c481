"""Which files are read, and as what: JSON lines or plain text."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NoReturn

from trackbed.errors import ArgumentError
from trackbed.tokens import get_seal_path

__all__ = ["InputFile", "Layout", "find_inputs"]


class Layout(Enum):
    """How a file holds its documents."""

    JSON_LINES = "jsonl"
    """One JSON object a line."""
    PLAIN_TEXT = "text"
    """The whole file is one document."""


_LAYOUTS: Final = {
    ".jsonl": Layout.JSON_LINES,
    ".json": Layout.JSON_LINES,
    ".txt": Layout.PLAIN_TEXT,
    ".md": Layout.PLAIN_TEXT,
}
_SEAL_SUFFIX: Final = get_seal_path("")


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, and how large it was when the work was planned."""

    path: Path
    layout: Layout
    size_bytes: int


def find_inputs(paths: Iterable[Path]) -> list[InputFile]:
    """The files that `paths` stand for, in order.

    A folder stands for the `.jsonl`, `.json`, `.txt` and `.md` files in it and below, sorted by path, without
    the seals of indexed files; links to folders are not followed. A file that is named stands for itself,
    plain text unless its name ends in `.jsonl` or `.json`.

    Raises:
        ArgumentError: a path is neither a file nor a folder, or a folder has no such file.
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
            Path(directory, name)
            for name in names
            if Path(name).suffix.lower() in _LAYOUTS and not name.endswith(_SEAL_SUFFIX)
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
    return InputFile(path, _LAYOUTS.get(path.suffix.lower(), Layout.PLAIN_TEXT), path.stat().st_size)


def _refuse(error: OSError) -> NoReturn:
    raise error
