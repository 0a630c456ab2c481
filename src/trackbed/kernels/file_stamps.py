"""Typed door to the kernel that looks at many files at once.

Shapes: N files.
"""

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.poll import Poll, current_poll

__all__ = ["file_stamps"]


def file_stamps(folder: str, names: Sequence[str], *, num_threads: int = 1, poll: Poll = None) -> npt.NDArray[np.int64]:
    """`[N, 3]` inode, size in bytes, and nanoseconds since 1970 at which it was last written, of each file.

    Thrice -1 for what is not there or cannot be looked at. One call of the system a file: Python takes twice as long.

    Args:
        folder: what relative names begin from.
        names: `[N]` names of files, none of them empty.
        num_threads: at least 1.
        poll: looks in while it runs, with the number of files that were looked at.

    Raises:
        ArgumentError: a name is empty or holds a zero byte.
    """
    stamps = np.empty((len(names), 3), dtype=np.int64)
    if not names:
        return stamps
    joined = os.fsencode("\0".join(names)) + b"\0"
    if joined.count(0) != len(names) or joined.startswith(b"\0") or b"\0\0" in joined:
        msg = f"{folder}: names of files must not be empty and hold no zero byte, found one of {len(names)} that does"
        raise ArgumentError(msg)
    _native.file_stamps(os.fsencode(folder), joined, stamps.reshape(-1), max(num_threads, 1), current_poll(poll))
    return stamps
