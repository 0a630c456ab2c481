"""Typed doors to kernels that treat many files in one call.

Thousands of small files are written at a start. Each call of the system that Python makes takes as long again, and
gives other threads the interpreter, which is then waited for.

Shapes: N files, S sets of F files.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.poll import Poll, current_poll

__all__ = [
    "FileSetFolders",
    "file_stamps",
    "joined_names",
    "publish_file_sets",
    "read_parts",
    "stamps_and_changes",
    "stamps_of_joined",
    "write_files",
]

Part = bytes | memoryview | npt.NDArray[Any]

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def write_files(files: Mapping[str, Sequence[Part]], *, poll: Poll = None) -> None:
    """Make new files of these parts, by path.

    Args:
        files: of each path, contiguous bytes that follow one another.
        poll: looks in while it runs.

    Raises:
        OSError: one cannot be written, for instance as there is a file of that name; those before it are there.
        ArgumentError: a path is empty or holds a zero byte.
    """
    parts = [part for parts in files.values() for part in parts]
    counts = np.array([len(parts) for parts in files.values()], dtype=np.int64)
    paths = list(files)
    for path in paths:
        sys.audit("open", path, None, _NEW_FILE)
    error, place = _native.write_files(joined_names(paths), parts, counts, current_poll(poll))
    if error:
        raise OSError(error, os.strerror(error), paths[place])


@dataclass(frozen=True, slots=True)
class FileSetFolders:
    """Where the files of sets lie: paths of folders that are there."""

    files: str
    """All of a set but the last."""
    claims: str
    """The last one of each set."""
    partials: str
    """Those that are not complete, unless they have no name."""


def publish_file_sets(
    folders: FileSetFolders,
    stems: Sequence[str],
    endings: Sequence[str],
    parts: Sequence[Part],
    counts: Sequence[int],
    *,
    partial_ending: str,
    may_be_unnamed: bool = True,
    poll: Poll = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Make sets of new files, each of which appears when its files are complete: the last one first, as a claim.

    A set of which some name is taken, or that cannot be written, leaves nothing behind. Where the system fails after
    the claim, that stays, with what appeared until then.

    Args:
        folders: where the files lie.
        stems: `[S]` what the names of a set's files begin with.
        endings: `[F]` how they end.
        parts: contiguous bytes, one after the other: those of each file of each set.
        counts: `[F]` how many parts each file of a set has.
        partial_ending: what names end with until a set appears; nobody else uses it.
        may_be_unnamed: whether files have no name at all until then, where the file system knows such files.
        poll: looks in while it runs, with the number of sets that are done.

    Returns:
        `[S]` 0 for a set that appeared, or the system's number of the error: EEXIST where a name was taken.
        `[S, F, 3]` what `file_stamps` says of the files of those that appeared.

    Raises:
        ArgumentError: a name is empty or holds a zero byte, or there are more or fewer parts than `counts` says.
    """
    is_right = len(parts) == len(stems) * sum(counts) and len(counts) == len(endings) > 0 and min(counts) >= 0
    if not is_right:
        wanted = f"{len(stems)} sets of {len(endings)} files must have {list(counts)} parts each"
        msg = f"{wanted}, found {len(parts)} in all"
        raise ArgumentError(msg)
    errors = np.empty(len(stems), dtype=np.int32)
    stamps = np.full((len(stems), len(endings), 3), -1, dtype=np.int64)
    _native.publish_file_sets(
        [os.fsencode(folder) for folder in (folders.files, folders.claims, folders.partials)],
        joined_names(stems),
        joined_names(endings),
        os.fsencode(partial_ending),
        may_be_unnamed,
        list(parts),
        np.tile(np.array(counts, dtype=np.int64), len(stems)),
        stamps.reshape(-1),
        errors,
        current_poll(poll),
    )
    return errors, stamps


def read_parts(
    paths: Sequence[str], starts: Sequence[int], sizes: Sequence[int], *, poll: Poll = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """A part of each file.

    Args:
        paths: `[N]` files.
        starts: `[N]` the byte at which the part of each begins.
        sizes: `[N]` bytes of each.
        poll: looks in while it runs, with the number of files that were read.

    Returns:
        The parts, one after the other; and `[N, 3]` what `file_stamps` says of the files: thrice -1 of one that cannot
        be read, or ends before its part does.

    Raises:
        ArgumentError: a path is empty or holds a zero byte, or a size is negative.
    """
    wanted = np.array([starts, sizes], dtype=np.int64)
    if (wanted < 0).any() or wanted.shape[1] != len(paths):
        msg = f"{len(paths)} files must have starts and sizes of at least 0, found {wanted.tolist()}"
        raise ArgumentError(msg)
    content = np.empty(int(wanted[1].sum()), dtype=np.uint8)
    stamps = np.empty((len(paths), 3), dtype=np.int64)
    _native.read_parts(joined_names(paths), wanted[0], wanted[1], content, stamps.reshape(-1), current_poll(poll))
    return content, stamps


def file_stamps(folder: str, names: Sequence[str], *, num_threads: int = 1, poll: Poll = None) -> npt.NDArray[np.int64]:
    """`[N, 3]` inode, size in bytes, and nanoseconds since 1970 at which it was last written, of each file.

    Thrice -1 for what is not there or cannot be looked at.

    Args:
        folder: what relative names begin from.
        names: `[N]` names of files.
        num_threads: at least 1.
        poll: looks in while it runs, with the number of files that were looked at.

    Raises:
        ArgumentError: a name is empty or holds a zero byte.
    """
    return stamps_of_joined(folder, joined_names(names), len(names), num_threads=num_threads, poll=poll)


def stamps_of_joined(
    folder: str, joined: bytes, count: int, *, num_threads: int = 1, poll: Poll = None
) -> npt.NDArray[np.int64]:
    """`file_stamps` of `count` names that were joined by `joined_names`, once for many looks."""
    stamps = np.empty((count, 3), dtype=np.int64)
    _look(folder, joined, stamps, np.empty(0, dtype=np.int64), num_threads, poll)
    return stamps


def stamps_and_changes(
    folder: str, names: Sequence[str], *, num_threads: int = 1, poll: Poll = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`file_stamps`, and the time at which each file last changed in any way.

    That time is `[N]` int64, in nanoseconds since 1970; -1 where there is no file. Archives
    and `rsync -t` set the time of writing; they cannot set that of the last change.
    """
    stamps, changes = np.empty((len(names), 3), dtype=np.int64), np.empty(len(names), dtype=np.int64)
    _look(folder, joined_names(names), stamps, changes, num_threads, poll)
    return stamps, changes


def _look(
    folder: str,
    joined: bytes,
    stamps: npt.NDArray[np.int64],
    changes: npt.NDArray[np.int64],
    num_threads: int,
    poll: Poll,
) -> None:
    _native.file_stamps(
        os.fsencode(folder), joined, stamps.reshape(-1), changes, max(num_threads, 1), current_poll(poll)
    )


def joined_names(names: Sequence[str]) -> bytes:
    """Each name, ended by a zero byte.

    Raises:
        ArgumentError: a name is empty or holds a zero byte.
    """
    joined = os.fsencode("".join(f"{name}\0" for name in names))
    if joined.count(0) != len(names) or joined.startswith(b"\0") or b"\0\0" in joined:
        msg = f"names of files must not be empty and hold no zero byte, found one of {len(names)} that does"
        raise ArgumentError(msg)
    return joined
