"""Files of a checkpoint, in a folder or in an object store: their sizes, and readers of them."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from trackbed.checkpoint.format.extents import SIDE_NAME
from trackbed.checkpoint.io.range_reader import Bytes, RangeReader
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.errors import CheckpointError, FormatError
from trackbed.files.regular import kind_of, open_regular

AnyFolder: TypeAlias = Path | StoredFolder
"""Folder of a checkpoint, on a file system or in an object store."""


class FileReader(RangeReader):
    """Reads ranges of a file of a file system.

    Args:
        descriptor: descriptor of the open file.
        name: name of the file, for errors.
        num_bytes: its size.
    """

    def __init__(self, descriptor: int, name: str, num_bytes: int) -> None:
        super().__init__(name, num_bytes)
        self._descriptor = descriptor

    def hold(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Does nothing: the system reads ahead."""

    def announce(self, end: int) -> None:
        """Does nothing."""

    def read_into(self, target: Bytes, start: int, what: str) -> None:
        """Fills an array from a place of the file on."""
        view = target.data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done : done + (1 << 30)]], start + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self._name}: {what} must be at byte {start:,}, but cannot be read: {error.strerror}"
                ) from error
            if count == 0:
                raise self._too_short(start + len(view), start + done, what)
            done += count


@contextmanager
def open_reader(folder: AnyFolder, name: str) -> Iterator[RangeReader]:
    """Opens a file of a checkpoint.

    Raises:
        CheckpointError: it is not there, or cannot be opened.
        StoreError: the store refuses, or does not answer in time.
    """
    if isinstance(folder, StoredFolder):
        yield folder.open(name)
        return
    try:
        descriptor, size = open_file(folder, name)
    except OSError as error:
        raise CheckpointError(f"{name}: must be in {folder}, but cannot be opened: {error.strerror}") from error
    try:
        yield FileReader(descriptor, name, size)
    finally:
        os.close(descriptor)


def open_file(folder: Path, name: str) -> tuple[int, int]:
    """Opens a regular file of a checkpoint. Returns its descriptor, and its size in bytes."""
    try:
        return open_regular(folder / name)
    except FormatError as error:
        raise CheckpointError(str(error).removeprefix(f"{folder}/")) from error


def maybe_read_file(folder: AnyFolder, name: str) -> bytes | None:
    """Reads a file of a checkpoint; None if there is none.

    Raises:
        CheckpointError: it cannot be read.
        StoreError: the store refuses, or does not answer in time.
    """
    if isinstance(folder, StoredFolder):
        return folder.read(name)
    try:
        descriptor, _ = open_file(folder, name)
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            return stream.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{name}: must be a file that can be read, but is not: {error.strerror}") from error
    except MemoryError as error:
        raise CheckpointError(f"{name}: must fit into memory, but does not") from error


def has_file(folder: AnyFolder, name: str) -> bool:
    """True if a checkpoint has a file.

    Raises:
        StoreError: the store refuses, or does not answer in time.
    """
    return folder.has(name) if isinstance(folder, StoredFolder) else (folder / name).exists()


def check_size(folder: AnyFolder, name: str, num_bytes: int) -> None:
    """Checks that a file is there, and as long as the side file says.

    Raises:
        CheckpointError: it is not.
        StoreError: the store refuses, or does not answer in time.
    """
    if isinstance(folder, StoredFolder):
        size = folder.size_of(name)
        if size is None:
            raise CheckpointError(f"{name}: must be in {folder}, as {SIDE_NAME} says, but is not")
    else:
        try:
            status = (folder / name).stat()
        except OSError as error:
            raise CheckpointError(
                f"{name}: must be in {folder}, as {SIDE_NAME} says, but is not: {error.strerror}"
            ) from error
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(
                f"{name}: must be a regular file, as {SIDE_NAME} says, found {kind_of(status.st_mode)}"
            )
        size = status.st_size
    if size != num_bytes:
        raise CheckpointError(f"{name}: must have {num_bytes:,} bytes, as {SIDE_NAME} says, but has {size:,}")
