"""Facts about entries that are found out after their manifests were written (docs/formats/cache.md).

A note that is lost costs its reader a check, no more.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import FormatError
from trackbed.files import BackgroundFlush, Stamp, read_regular, stamp_of

__all__ = [
    "NoteFile",
    "Notes",
    "await_flush",
    "data_note",
    "entry_digest",
    "find_note_files",
    "flush_later",
    "flushed_note",
    "read_notes",
    "texts_in",
    "write_notes",
]

logger = logging.getLogger(__name__)

Notes = frozenset[str]
"""Lines of all files of notes of one cache."""

_NO_NOTES: Final[Notes] = frozenset()
_READ: dict[str, tuple[Stamp, Notes]] = {}
"""Notes of each folder, with the stamp that the folder had before they were read."""


def entry_digest(stamps: npt.NDArray[np.int64]) -> str:
    """Returns the name of an entry in notes: 32 digits, from `[F, 3]` stamps of its files, the manifest's last."""
    return hashlib.sha256(np.ascontiguousarray(stamps, dtype="<i8").data).hexdigest()[:32]


def flushed_note(digest: str) -> str:
    """Returns the line which states that an entry's files are on the disk."""
    return f"flushed {digest}"


def data_note(digest: str, data_stamps: str) -> str:
    """Returns the line which states that an entry's checksum of the data is that of files with these stamps."""
    return f"data {digest} {hashlib.sha256(data_stamps.encode()).hexdigest()[:32]}"


class NoteFile(NamedTuple):
    """A file of notes that was found."""

    path: str
    digests: frozenset[str]
    """Names of the entries that it mentions."""


def find_note_files(own: str) -> list[NoteFile]:
    """Returns the files of notes in the folder `own`, which is Trackbed's."""
    return [
        NoteFile(path, frozenset(words[1] for words in map(str.split, text.splitlines()) if len(words) > 1))
        for path, text in texts_in(f"{own}/notes")
    ]


def read_notes(own: str) -> Notes:
    """Returns the notes in the folder `own`, which is Trackbed's; reads them again if a file was added or removed."""
    folder = f"{own}/notes"
    try:
        stamp = stamp_of(folder)
    except OSError:  # it cannot be reached: what it states is checked again
        return _NO_NOTES
    if stamp is None:
        return _NO_NOTES
    known = _READ.get(own)
    if known is None or known[0] != stamp:
        known = _READ[own] = stamp, frozenset(line for _, text in texts_in(folder) for line in text.splitlines())
    return known[1]


def texts_in(folder: str) -> Iterator[tuple[str, str]]:
    """Yields path and content of each text file in a folder."""
    for path in sorted(Path(folder).glob("*.txt")):
        try:
            yield str(path), read_regular(path).decode(errors="replace")
        except (OSError, FormatError):  # removed meanwhile, or unreadable: what it stated is checked again
            continue


def write_notes(own: str, lines: Iterable[str]) -> None:
    """Leaves notes in the folder `own`, if it can be written to."""
    text = "".join(f"{line}\n" for line in sorted(set(lines))).encode()
    if not text:
        return
    name = f"{hashlib.sha256(text).hexdigest()[:32]}.txt"
    try:
        Path(own, "notes").mkdir(exist_ok=True)
        path = f"{own}/notes/{name}"
        # Opening a pipe of that name would otherwise wait for a reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK
        with open(os.open(path, flags, 0o666), "wb") as file:  # noqa: PTH123  a descriptor
            file.write(text)  # a line that is cut names no entry
    except OSError as error:  # a cache that can only be read is served, too
        logger.debug("%s: no note was left: %s", own, error)


def _note_flushed(own: str, stamps: Iterable[npt.NDArray[np.int64]]) -> None:
    write_notes(own, (flushed_note(entry_digest(one)) for one in stamps))


_FLUSH: Final = BackgroundFlush(_note_flushed)
await_flush: Final = _FLUSH.join
flush_later: Final = _FLUSH.add
"""Flushes entries in the background, and then notes that they are on the disk.

Called with a pair for each entry: its folder, which is Trackbed's, and the stamps of its files.
"""
