"""Sources of token bytes: memory maps and plain files."""

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError, FormatError
from trackbed.files import DESCRIPTORS, Stamp, open_regular, stamp_of
from trackbed.tokens.format import map_file

Tokens = npt.NDArray[np.number[Any]]


class RangeError(ArgumentError, FormatError):
    """Tokens are asked for that a file does not have. Also a FormatError, for handlers of damaged files."""


class Source(Protocol):
    """Random access to the bytes of a `.bin`."""

    def read(self, dtype: type[np.number[Any]], count: int, offset: int) -> Tokens:
        """`[count]` tokens from byte `offset` on.

        Raises:
            FormatError: the range is not inside the file.
        """
        ...


class MappedSource:
    """A memory-mapped file. Reads return read-only views, which keep the map alive.

    Args:
        data: the bytes of the file.
        path: path of the file.
        stamp: identity of the file when it was mapped, or None if it was already gone.
    """

    def __init__(self, data: npt.NDArray[np.uint8], path: str | Path, stamp: Stamp | None) -> None:
        self.data = data
        self.path = path
        self.stamp = stamp

    @classmethod
    def open(cls, path: str | Path) -> "MappedSource":
        """Maps the file at `path`.

        Raises:
            MapRefusedError: the system refuses the map.
        """
        return cls(map_file(path, may_read=False), path, stamp_of(path))

    def check_size(self, current: Stamp | None) -> None:
        """Checks that the file was not truncated: mapped pages beyond its end cannot be read.

        A file that was renamed or removed cannot be checked, and passes.

        Args:
            current: current identity of the file at this path, or None if there is none.

        Raises:
            FormatError: the file was truncated.
        """
        if current is None or self.stamp is None or current.inode != self.stamp.inode:
            return  # the mapped file no longer has this path
        if current.size_bytes < len(self.data):
            wanted = f"the file must keep the {len(self.data)} bytes that were mapped"
            raise FormatError(f"{self.path}: {wanted}, found it truncated to {current.size_bytes}")

    def read(self, dtype: type[np.number[Any]], count: int, offset: int) -> Tokens:
        """`[count]` tokens from byte `offset` on, as a view."""
        stop = offset + count * np.dtype(dtype).itemsize
        if not 0 <= offset <= stop <= len(self.data):
            raise _outside(self.path, offset, stop, len(self.data))
        return self.data[offset:stop].view(dtype)


class FileSource:
    """A file that is read piece by piece. Reads return new arrays.

    The descriptor stays open, so the original content is read even if the file is replaced. Positional reads share no
    state between threads or forked processes.

    Args:
        descriptor: a file descriptor open for reading, closed with this object.
        path: path of the file, for error messages.
    """

    def __init__(self, descriptor: int, path: str | Path) -> None:
        self._descriptor = descriptor
        self._path = path

    @classmethod
    def open(cls, path: str | Path) -> "FileSource":
        """Opens the file at `path`. If too many files are open, the least recently used ones are closed first."""
        DESCRIPTORS.make_room()
        descriptor, _ = open_regular(path)
        DESCRIPTORS.opened(descriptor)
        return cls(descriptor, path)

    def __del__(self) -> None:
        DESCRIPTORS.closed(self._descriptor)
        os.close(self._descriptor)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the path; a copy reopens the file."""
        return FileSource.open, (self._path,)

    def read(self, dtype: type[np.number[Any]], count: int, offset: int) -> Tokens:
        """`[count]` tokens from byte `offset` on, as a new array."""
        stop = offset + count * np.dtype(dtype).itemsize
        size = os.fstat(self._descriptor).st_size
        if not 0 <= offset <= stop <= size:
            raise _outside(self._path, offset, stop, size)
        tokens = np.empty(count, dtype=dtype)
        view = tokens.data.cast("B")
        done = 0
        while done < len(view):
            got = os.preadv(self._descriptor, [view[done:]], offset + done)
            if got == 0:
                raise _outside(self._path, offset, stop, offset + done)
            done += got
        return tokens


def _outside(path: str | Path, start: int, stop: int, size: int) -> FormatError:
    return FormatError(f"{path}: a read of bytes [{start}, {stop}) must lie inside the file, which has {size}")
