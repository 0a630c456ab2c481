"""Facts about entries that are found out after their manifests were written (docs/formats/cache.md).

An entry is named by the stamps of its files, so that a note says nothing of files that take their place. A note is a
line of text; each writer leaves its lines in one file, named by what it holds, and readers take the lines of all files.
A note that is lost costs its reader a check, no more.
"""

import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.cache.traces import leaves_traces
from trackbed.errors import FormatError
from trackbed.files import Stamp, flush_file_system, read_regular, stamp_of

__all__ = [
    "NoteFile",
    "Notes",
    "await_flush",
    "data_note",
    "entry_digest",
    "find_note_files",
    "flush_later",
    "flushed_note",
    "note_data",
    "read_notes",
    "write_data_notes",
    "write_notes",
]

logger = logging.getLogger(__name__)

Notes = frozenset[str]
"""Lines of all files of notes of one cache."""

_NO_NOTES: Final[Notes] = frozenset()
_READ: dict[str, tuple[Stamp, Notes]] = {}
"""Notes of each folder, with the stamp that the folder had before they were read."""


def entry_digest(stamps: npt.NDArray[np.int64]) -> str:
    """Name of an entry in notes: 32 digits, from `[F, 3]` stamps of its files, the manifest's last."""
    return hashlib.sha256(np.ascontiguousarray(stamps, dtype="<i8").data).hexdigest()[:32]


def flushed_note(digest: str) -> str:
    """The line that says that an entry's files are on the disk."""
    return f"flushed {digest}"


def data_note(digest: str, data_stamps: str) -> str:
    """The line that says that an entry's checksum of the data is that of files with these stamps."""
    return f"data {digest} {hashlib.sha256(data_stamps.encode()).hexdigest()[:32]}"


class NoteFile(NamedTuple):
    """A file of notes that was found."""

    path: str
    digests: frozenset[str]
    """Names of the entries that it speaks of."""


def find_note_files(own: str) -> list[NoteFile]:
    """The files of notes in the folder `own`, which is Trackbed's."""
    return [
        NoteFile(path, frozenset(words[1] for words in map(str.split, text.splitlines()) if len(words) > 1))
        for path, text in _texts(f"{own}/notes")
    ]


def read_notes(own: str) -> Notes:
    """The notes in the folder `own`, which is Trackbed's; read anew when a file was added or removed."""
    folder = f"{own}/notes"
    try:
        stamp = stamp_of(folder)
    except OSError:  # it cannot be reached: what it says is checked again
        return _NO_NOTES
    if stamp is None:
        return _NO_NOTES
    known = _READ.get(own)
    if known is None or known[0] != stamp:
        known = _READ[own] = stamp, frozenset(line for _, text in _texts(folder) for line in text.splitlines())
    return known[1]


def _texts(folder: str) -> Iterable[tuple[str, str]]:
    for path in sorted(Path(folder).glob("*.txt")):
        try:
            yield str(path), read_regular(path).decode(errors="replace")
        except (OSError, FormatError):  # removed meanwhile, or unreadable: what it said is checked again
            continue


def write_notes(own: str, lines: Iterable[str]) -> None:
    """Leave notes in the folder `own`, where it can be written to."""
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


class _DataNotes:
    """Notes about data that wait to be written together: thousands of entries are checked in one start."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._lines: defaultdict[str, set[str]] = defaultdict(set)

    def add(self, own: str, line: str) -> None:
        """Take a note; `write` leaves it."""
        with self._lock:
            self._lines[own].add(line)

    def write(self) -> None:
        """Leave all notes taken so far."""
        with self._lock:
            lines, self._lines = self._lines, defaultdict(set)
        for own, some in lines.items():
            write_notes(own, some)


_DATA_NOTES: Final = _DataNotes()
write_data_notes: Final = _DATA_NOTES.write


class _Flusher:
    """Flushes file systems in the background, and then notes which entries are on the disk."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what waits: a forked process has no thread, and its parent flushes."""
        self._lock = Lock()
        self._waiting: defaultdict[str, list[npt.NDArray[np.int64]]] = defaultdict(list)
        self._idle = Event()
        self._idle.set()

    def add(self, stamps: Mapping[str, Iterable[npt.NDArray[np.int64]]]) -> None:
        """Flush and note entries, given by their stamps, by folder; returns at once."""
        with self._lock:
            for own, some in stamps.items():
                self._waiting[own] += some
            if not self._waiting or not self._idle.is_set():
                return
            self._idle.clear()
        Thread(target=self._work, name="trackbed-flush", daemon=True).start()

    def join(self) -> None:
        """Return when nothing waits to be flushed."""
        self._idle.wait()

    def _work(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, defaultdict(list)
                if not waiting:
                    self._idle.set()
                    return
            flushed: dict[int, bool] = {}
            for own, stamps in waiting.items():
                try:
                    if self._flush(own, flushed):
                        write_notes(own, (flushed_note(entry_digest(one)) for one in stamps))
                except BaseException:  # its entries are checked once more; nothing waits for this thread for ever
                    logger.exception("%s: its entries are not known to be on the disk", own)

    @staticmethod
    def _flush(own: str, flushed: dict[int, bool]) -> bool:
        """Flush the file system of a folder, unless that was done for another one. True if all is on the disk."""
        try:
            device = os.stat(own).st_dev  # noqa: PTH116
            if device not in flushed:
                flushed[device] = False
                flush_file_system(own)
                flushed[device] = True
        except OSError as error:
            logger.debug("%s: its entries are not known to be on the disk: %s", own, error)
            return False
        return flushed[device]


_FLUSHER: Final = _Flusher()
await_flush: Final = _FLUSHER.join
os.register_at_fork(after_in_child=_FLUSHER.reset)


def note_data(own: str, line: str) -> None:
    """Take a note about data, unless no traces are to be left; `write_data_notes` leaves it."""
    if leaves_traces():
        _DATA_NOTES.add(own, line)


def flush_later(stamps: Mapping[str, Iterable[npt.NDArray[np.int64]]]) -> None:
    """Flush and note entries in the background, unless no traces are to be left.

    Args:
        stamps: of their files, by folder.
    """
    if leaves_traces():
        _FLUSHER.add(stamps)
