"""Facts about entries that come after their manifests: when they were last used, and results of checks.

The format is in docs/formats/cache.md. A note that is lost costs its reader a check, no more.

A start uses thousands of entries and does not touch each of them: it leaves one small file that lists them all, named
by its content, and from then on touches that file at most once a day. Access times that the system keeps are of no use
for this, as listing or copying a cache changes them too.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.cache.entry import Entry
from trackbed.errors import FormatError
from trackbed.files import BackgroundFlush, Stamp, partial_name, publish, read_regular, stamp_of, write_new

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
    """Returns the line which states that files with these stamps have an entry's checksum of the data."""
    return f"data {digest} {hashlib.sha256(data_stamps.encode()).hexdigest()[:32]}"


class NoteFile(NamedTuple):
    """A file of notes that was found."""

    path: str
    digests: frozenset[str]
    """Names of the entries that it mentions; none while they are being flushed."""
    last_written: float = 0.0
    """Seconds since 1970."""


def find_note_files(own: str) -> list[NoteFile]:
    """Returns the files of notes in the folder `own`, which is Trackbed's."""
    found = []
    for path, text in texts_in(f"{own}/notes"):
        with contextlib.suppress(OSError):  # removed meanwhile
            digests = frozenset(words[1] for words in map(str.split, text.splitlines()) if len(words) > 1)
            found.append(NoteFile(path, digests, Path(path).stat().st_mtime))
    return found


def read_notes(own_folder: str) -> Notes:
    """Returns the notes in Trackbed's folder `own_folder`; reads them again if one was added or removed."""
    folder = f"{own_folder}/notes"
    try:
        stamp = stamp_of(folder)
    except OSError:  # it cannot be reached: what it states is checked again
        return _NO_NOTES
    if stamp is None:
        return _NO_NOTES
    known = _READ.get(own_folder)
    if known is None or known[0] != stamp:
        known = _READ[own_folder] = (
            stamp,
            frozenset(line for _, text in texts_in(folder) for line in text.splitlines()),
        )
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
    text = _text_of(lines)
    if text:
        mark = FlushMark(own, _make_file(own, text), text)
        _write(mark)


class FlushMark(NamedTuple):
    """A file of notes that is empty until entries are on the disk."""

    own_folder: str
    """Folder of the entries, which is Trackbed's."""
    path: str
    """The file; empty if none could be made."""
    text: bytes
    """Its content, once they are on the disk."""


def make_marks(entries: Iterable[tuple[str, npt.NDArray[np.int64]]]) -> list[FlushMark]:
    """Makes the files that will state that entries are on the disk, one in each folder.

    They are made before a start ends, and not after the flush: whoever removes the cache when a start is over must not
    find a name that appears meanwhile.

    Args:
        entries: for each its folder, which is Trackbed's, and the stamps of its files.
    """
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for own, stamps in entries:
        lines[own].append(flushed_note(entry_digest(stamps)))
    texts = {own: _text_of(some) for own, some in lines.items()}
    return [FlushMark(own, _make_file(own, text), text) for own, text in texts.items()]


def flush_and_mark(marks: Iterable[FlushMark]) -> None:
    """Flushes entries in the background, and then marks them; makes, renames and removes no name."""
    _FLUSH.add((mark.own_folder, mark) for mark in marks)


def flush_later(entries: Iterable[tuple[str, npt.NDArray[np.int64]]]) -> None:
    """Flushes entries in the background; see `make_marks`."""
    flush_and_mark(make_marks(entries))


def _text_of(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in sorted(set(lines))).encode()


def _make_file(own_folder: str, text: bytes) -> str:
    """Makes the file for notes with this text, which names it. Returns its path; an empty one if it cannot be made."""
    path = f"{own_folder}/notes/{hashlib.sha256(text).hexdigest()[:32]}.txt"
    try:
        Path(own_folder, "notes").mkdir(exist_ok=True)
        # Opening a pipe of that name would otherwise wait for a reader.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666))
    except OSError as error:  # a cache that can only be read is served, too
        logger.debug("%s: no note was left: %s", own_folder, error)
        return ""
    return path


def _write(mark: FlushMark) -> None:
    """Writes the text into the file, unless somebody has removed it."""
    if not mark.path:
        return
    try:
        with open(os.open(mark.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK), "wb") as file:
            file.write(mark.text)  # a line that is cut names no entry
            file.truncate()
        # Readers compare the time of the folder, which a write into one of its files does not change.
        os.utime(os.path.dirname(mark.path))
    except OSError as error:
        logger.debug("%s: no note was left: %s", mark.own_folder, error)


def _write_all(_own: str, marks: Iterable[FlushMark]) -> None:
    for mark in marks:
        _write(mark)


_FLUSH: Final = BackgroundFlush(_write_all)
await_flush: Final = _FLUSH.join


DAY_SECONDS: Final = 86_400.0
"""Resolution of the time of last use."""


class Use(NamedTuple):
    """The entries that one start used, and when it last did."""

    path: str
    """The file that says so."""
    names: tuple[str, ...]
    """Stems of entries, or fingerprints of entries that Megatron Core cannot read."""
    last_used: float
    """Seconds since 1970."""


def note_use(entries: Iterable[Entry]) -> None:
    """Records that entries are in use now, in each cache that can be written.

    Takes one system call if the same entries were used within a day, however many they are.
    """
    by_folder: defaultdict[str, set[str]] = defaultdict(set)
    for entry in entries:
        by_folder[entry.own_folder].add(entry.stem if entry.megatron else entry.fingerprint)
    for own, names in by_folder.items():
        try:
            _note(own, "".join(f"{name}\n" for name in sorted(names)).encode())
        except OSError as error:  # a read-only cache is used, too
            logger.debug("%s: no note of its use: %s", own, error)


def _note(own_folder: str, listing: bytes) -> None:
    name = f"{hashlib.sha256(listing).hexdigest()[:32]}.txt"
    path = f"{own_folder}/uses/{name}"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - os.stat(path).st_mtime > DAY_SECONDS:
            os.utime(path)
        return
    # Not `own_folder` itself, which is absent if only Megatron Core has written here.
    for folder in (f"{own_folder}/uses", f"{own_folder}/partial"):
        Path(folder).mkdir(exist_ok=True)
    partial = f"{own_folder}/partial/{partial_name(name)}"
    try:
        write_new(partial, listing)
        publish(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def find_uses(own: str) -> list[Use]:
    """Returns the uses that starts have recorded in the folder `own`, which is Trackbed's."""
    found = []
    for path, text in texts_in(f"{own}/uses"):
        with contextlib.suppress(OSError):  # removed meanwhile
            found.append(Use(path, tuple(text.split()), os.stat(path).st_mtime))
    return found


def last_uses(uses: Sequence[Use]) -> Mapping[str, float]:
    """Returns the time of the last use of each name, in seconds since 1970."""
    latest: dict[str, float] = {}
    for use in uses:
        for name in use.names:
            latest[name] = max(use.last_used, latest.get(name, 0.0))
    return latest
