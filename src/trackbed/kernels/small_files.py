"""Typed wrappers of the kernels that read, write and stat many small files in one call.

A start writes thousands of small files. From Python each system call takes twice as long, and releases the interpreter
to other threads, which must then be waited for.

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
    """Write new files.

    Args:
        files: for each path, the parts of the file in order, each of contiguous bytes.
        poll: progress callback.

    Raises:
        OSError: a file cannot be written, for instance because it exists. The files before it were written.
        ArgumentError: a path is empty or contains a zero byte.
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
    """Existing folders for the files of sets."""

    files: str
    """Folder of all files of a set but the last."""
    claims: str
    """Folder of the last file of each set."""
    partials: str
    """Folder of incomplete files, unless these are unnamed."""


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
    """Write sets of new files. A set gets its final names once all of its files are complete.

    The last file of a set is published first and serves as a claim. A set with a name that already exists, or that
    cannot be written, leaves nothing behind. If a system call fails after the claim, the claim stays, with the files
    that were published before the failure.

    Args:
        folders: folders of the files.
        stems: `[S]` common prefix of the names of a set's files.
        endings: `[F]` suffixes of the names.
        parts: contiguous bytes: the parts of each file of each set, in order.
        counts: `[F]` number of parts of each file of a set.
        partial_ending: suffix of names until a set is published, unique to this call.
        may_be_unnamed: True to keep files unnamed until then, if the file system supports it.
        poll: progress callback, called with the number of sets done.

    Returns:
        `[S]` 0 for a published set, else the errno: EEXIST if a name exists.
        `[S, F, 3]` `file_stamps` of the files of published sets.

    Raises:
        ArgumentError: a name is empty or contains a zero byte, or the number of parts does not match `counts`.
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
    """Reads a range of bytes of each file.

    Args:
        paths: `[N]` files.
        starts: `[N]` first byte of each range.
        sizes: `[N]` number of bytes of each range.
        poll: progress callback, called with the number of files read.

    Returns:
        The concatenated ranges; and `[N, 3]` `file_stamps` of the files, three times -1 for a file that cannot be read
        or that ends before its range does.

    Raises:
        ArgumentError: a path is empty or contains a zero byte, or a start or size is negative.
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
    """`[N, 3]` inode, size in bytes, and modification time in nanoseconds since 1970 of each file.

    Three times -1 for a file that does not exist or whose status cannot be read.

    Args:
        folder: folder of relative names.
        names: `[N]` names of files.
        num_threads: at least 1.
        poll: progress callback, called with the number of files done.

    Raises:
        ArgumentError: a name is empty or contains a zero byte.
    """
    return stamps_of_joined(folder, joined_names(names), len(names), num_threads=num_threads, poll=poll)


def stamps_of_joined(
    folder: str, joined: bytes, count: int, *, num_threads: int = 1, poll: Poll = None
) -> npt.NDArray[np.int64]:
    """`file_stamps` of `count` names joined by `joined_names`, for names that are used repeatedly."""
    stamps = np.empty((count, 3), dtype=np.int64)
    _stat(folder, joined, stamps, np.empty(0, dtype=np.int64), num_threads, poll)
    return stamps


def stamps_and_changes(
    folder: str, names: Sequence[str], *, num_threads: int = 1, poll: Poll = None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`file_stamps`, and `[N]` change time (ctime) of each file in nanoseconds since 1970, -1 where there is no file.

    Archive tools and `rsync -t` set the modification time of a file; they cannot set its change time.
    """
    stamps, changes = np.empty((len(names), 3), dtype=np.int64), np.empty(len(names), dtype=np.int64)
    _stat(folder, joined_names(names), stamps, changes, num_threads, poll)
    return stamps, changes


def _stat(
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
    """Concatenates names, each followed by a zero byte.

    Raises:
        ArgumentError: a name is empty or contains a zero byte.
    """
    joined = os.fsencode("".join(f"{name}\0" for name in names))
    if joined.count(0) != len(names) or joined.startswith(b"\0") or b"\0\0" in joined:
        msg = f"names of files must not be empty or contain a zero byte, found one of {len(names)} that does"
        raise ArgumentError(msg)
    return joined
