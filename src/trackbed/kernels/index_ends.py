"""Typed wrapper of the kernel that reads the ends of many index files.

Shapes: N files.
"""

import os
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from trackbed.kernels import _native
from trackbed.kernels.poll import Poll, current_poll
from trackbed.kernels.small_files import joined_names

__all__ = ["RawIndexEnds", "read_index_ends"]

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC


class RawIndexEnds(NamedTuple):
    """Unchecked contents of both ends of an `.idx` file."""

    stamp: tuple[int, int, int]
    """The file's row of `file_stamps`."""
    head: memoryview
    """The header, and the 4 KiB that follow it."""
    ends: memoryview
    """`head`, followed by the last 4 KiB of the file. In a short file the two overlap."""
    last_length: int
    """Tokens in the last sequence; 0 if there is none, or if the counts exceed the file."""
    last_pointer: int
    """Byte offset of the last sequence; 0 as for `last_length`."""
    last_border: int
    """The last document border; 0 as for `last_length`."""


def read_index_ends(paths: Sequence[str], *, num_threads: int = 1, poll: Poll = None) -> list[RawIndexEnds | OSError]:
    """Reads both ends of `.idx` files. Takes 8 KiB of memory per file.

    Args:
        paths: `[N]` files.
        num_threads: at least 1. On a network file system the threads mostly wait.
        poll: progress callback, called with the number of files read.

    Returns:
        `[N]` contents of each file, or the error of a file that cannot be read.

    Raises:
        ArgumentError: a path is empty or contains a zero byte.
    """
    joined = joined_names(paths)
    for path in paths:
        sys.audit("open", path, None, _FLAGS)
    content = np.empty((len(paths), _native.INDEX_ENDS_BYTES), dtype=np.uint8)
    words = np.empty((len(paths), _native.INDEX_ENDS_WORDS), dtype=np.int64)
    _native.read_index_ends(joined, content.reshape(-1), words.reshape(-1), max(num_threads, 1), current_poll(poll))
    found: list[RawIndexEnds | OSError] = []
    for path, raw, (error, inode, size, modified, head, tail, *numbers) in zip(
        paths, content, words.tolist(), strict=True
    ):
        if error:
            found.append(OSError(error, os.strerror(error), path))
        else:
            found.append(RawIndexEnds((inode, size, modified), raw[:head].data, raw[: head + tail].data, *numbers))
    return found
