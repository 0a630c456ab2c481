"""Operations on many files in one call, without the GIL.

A start reads and writes thousands of small files. One Python call for each system call would take twice as long.

Shapes: N files.
"""

import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import current_poll
from trackbed.errors import ArgumentError
from trackbed.files import _native

Stamps = npt.NDArray[np.int64]
"""`[N, 3]` inode, size in bytes, and time of the last write in nanoseconds since 1970, of each file.

All are -1 if there is no file; if it cannot be examined, the first two are -1 and the last is the errno.
"""

Part = bytes | memoryview | npt.NDArray[Any]


def read_stamps(paths: Sequence[str], *, num_threads: int = 1, joined: bytes | None = None) -> Stamps:
    """Returns the stamps of files.

    Args:
        paths: `[N]` files.
        num_threads: at least 1.
        joined: `join_names(paths)`, if the caller keeps it for many calls.

    Raises:
        ArgumentError: a path is empty or has a zero byte.
    """
    stamps = np.empty((len(paths), 3), dtype=np.int64)
    names = join_names(paths) if joined is None else joined
    _native.read_stamps(names, stamps.reshape(-1), max(num_threads, 1), current_poll(None))
    return stamps


def read_parts(
    paths: Sequence[str], starts: Sequence[int], sizes: Sequence[int]
) -> tuple[npt.NDArray[np.uint8], Stamps]:
    """Reads a part of each file.

    Args:
        paths: `[N]` files.
        starts: `[N]` offset in bytes of each part.
        sizes: `[N]` bytes of each part.

    Returns:
        The parts, one after the other; and the stamps of the files: those of a file that cannot be read, or ends
        before its part does, are -1.

    Raises:
        ArgumentError: a path is empty or has a zero byte, or a number is negative.
    """
    wanted = np.array([starts, sizes], dtype=np.int64)
    if (wanted < 0).any() or wanted.shape[1] != len(paths):
        raise ArgumentError(f"{len(paths)} files must have starts and sizes of at least 0, found {wanted.tolist()}")
    content = np.empty(int(wanted[1].sum()), dtype=np.uint8)
    stamps = np.empty((len(paths), 3), dtype=np.int64)
    _native.read_parts(join_names(paths), wanted[0], wanted[1], content, stamps.reshape(-1), current_poll(None))
    return content, stamps


class Claim(IntEnum):
    """How the last file of a set, which claims the name of the set, appears."""

    take = 0
    """First, unless there is a file of that name: then the set does not appear."""
    replace = 1
    """First, in place of any file of that name."""
    none = 2
    """Not at all: it is not written, as the name belongs to the set already."""


class NewFile(NamedTuple):
    """A file that is to appear."""

    path: str
    partial: str
    """Its path until it appears. Nothing else has that name."""
    parts: Sequence[Part] | None
    """Contiguous bytes; None if the file is complete at its partial path."""


class FileSet(NamedTuple):
    """Files that appear together."""

    files: Sequence[NewFile]
    """At least one; the last one is the claim."""
    claim: Claim


def commit_file_sets(sets: Sequence[FileSet], *, may_be_unnamed: bool = True) -> tuple[list[int], list[Stamps]]:
    """Writes sets of files; each appears once all of its files are complete.

    The claim appears first, then the files whose old size fits, then the others: so all sizes fit only when every file
    is the new one. A set that does not appear leaves nothing behind but partial files that were complete before. If the
    system fails after the claim appeared, that stays, with the files that appeared until then.

    Args:
        sets: in folders that exist.
        may_be_unnamed: True if files may have no name until they appear, where the file system supports that.

    Returns:
        For each set 0 if it appeared, or an errno: EEXIST if its claim was taken, EALREADY if it has none and all of
        its files had the right size. And for each set the stamps of its files, if they appeared.

    Raises:
        ArgumentError: a path is empty or has a zero byte.
    """
    files = [file for file_set in sets for file in file_set.files]
    errors = np.empty(len(sets), dtype=np.int32)
    stamps = np.full((len(files), 3), -1, dtype=np.int64)
    counts = np.array([len(file_set.files) for file_set in sets], dtype=np.int64)
    _native.commit_file_sets(
        join_names([file.path for file in files]),
        join_names([file.partial for file in files]),
        np.array([-1 if file.parts is None else len(file.parts) for file in files], dtype=np.int64),
        [part for file in files for part in file.parts or ()],
        counts,
        np.array([file_set.claim for file_set in sets], dtype=np.uint8),
        may_be_unnamed,
        stamps.reshape(-1),
        errors,
        current_poll(None),
    )
    return errors.tolist(), np.split(stamps, np.cumsum(counts)[:-1]) if sets else []


def join_names(names: Sequence[str]) -> bytes:
    """Returns the names one after the other, each ended by a zero byte.

    Raises:
        ArgumentError: a name is empty or has a zero byte.
    """
    joined = os.fsencode("".join(f"{name}\0" for name in names))
    if joined.count(0) != len(names) or joined.startswith(b"\0") or b"\0\0" in joined:
        raise ArgumentError(
            f"file names must not be empty or have a zero byte, found one of {len(names)} that is or has"
        )
    return joined


_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC


class RawIndexEnds(NamedTuple):
    """Parts of an `.idx` file that are read to open it, unchecked."""

    stamp: tuple[int, int, int]
    """Inode, size in bytes and time of the last write, as `read_stamps` gives them."""
    changed_ns: int
    """Nanoseconds since 1970 at which the file last changed in any way; this time cannot be set."""
    head: memoryview
    """The header and the 4 KiB that follow it."""
    ends: memoryview
    """`head` and the last 4 KiB of the file, which overlap in a short file."""
    last_length: int
    """Tokens in the last sequence. Like the two below, 0 where there is none, or the counts exceed the file."""
    last_pointer: int
    """Byte offset of the last sequence."""
    last_border: int
    """The last document border."""


def read_index_ends(paths: Sequence[str], *, num_threads: int = 1) -> list[RawIndexEnds | OSError]:
    """Reads the ends of `.idx` files; an OSError stands for one that cannot be read. Takes 8 KiB of memory a file.

    Args:
        paths: `[N]` files.
        num_threads: at least 1; on a network file system most of them wait.

    Raises:
        ArgumentError: a path is empty or has a zero byte.
    """
    joined = join_names(paths)
    for path in paths:
        sys.audit("open", path, None, _FLAGS)
    content = np.empty((len(paths), _native.INDEX_ENDS_BYTES), dtype=np.uint8)
    words = np.empty((len(paths), _native.INDEX_ENDS_WORDS), dtype=np.int64)
    _native.read_index_ends(joined, content.reshape(-1), words.reshape(-1), max(num_threads, 1), current_poll(None))
    results: list[RawIndexEnds | OSError] = []
    for path, raw, (error, inode, size, modified, changed, head, tail, *numbers) in zip(
        paths, content, words.tolist(), strict=True
    ):
        if error:
            results.append(OSError(error, os.strerror(error), path))
        else:
            stamp, ends = (inode, size, modified), raw[: head + tail].data
            results.append(RawIndexEnds(stamp, changed, raw[:head].data, ends, *numbers))
    return results
