"""Ends of many `.idx` files, read in one call.

Shapes: N files.
"""

import os
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from trackbed.cancellation import current_poll
from trackbed.files import _native
from trackbed.files.many import join_names

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
    found: list[RawIndexEnds | OSError] = []
    for path, raw, (error, inode, size, modified, changed, head, tail, *numbers) in zip(
        paths, content, words.tolist(), strict=True
    ):
        if error:
            found.append(OSError(error, os.strerror(error), path))
        else:
            stamp, ends = (inode, size, modified), raw[: head + tail].data
            found.append(RawIndexEnds(stamp, changed, raw[:head].data, ends, *numbers))
    return found
