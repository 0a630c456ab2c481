"""A typed door to the kernel that reads what is needed to open many index files.

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
    """What was read of an `.idx` file. Nothing in it was checked."""

    stamp: tuple[int, int, int]
    """What `file_stamps` says of it."""
    head: memoryview
    """The header, and the 4 KiB that follow it."""
    ends: memoryview
    """`head`, and the last 4 KiB of the file: of a short one, some bytes are in both."""
    last_length: int
    """Tokens in the last sequence. As the other two, 0 where there is none, or the counts are beyond the file."""
    last_pointer: int
    """Byte offset of the last sequence."""
    last_border: int
    """The last document border."""


def read_index_ends(paths: Sequence[str], *, num_threads: int = 1, poll: Poll = None) -> list[RawIndexEnds | OSError]:
    """What is read of `.idx` files to open them, or why one cannot be read. Takes 8 KiB of memory a file.

    Args:
        paths: `[N]` files.
        num_threads: at least 1. On a network file system most of them wait.
        poll: looks in while it runs, with the number of files that were read.

    Raises:
        ArgumentError: a path is empty or holds a zero byte.
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
