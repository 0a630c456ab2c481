"""Files that other hosts have written, and that this one does not see yet.

Network file systems (NFS, VAST) cache what a folder contains, usually for up to a minute.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trackbed.cancellation import check_cancelled
from trackbed.files.regular import Stamp, stamp_of

_SECONDS = 1.0
_GAP_SECONDS: Final = 0.05


def look_again_in(folder: str | Path) -> None:
    """Opens a folder, after which most network file systems ask the server what is in it."""
    with contextlib.suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def stamps_of_files(paths: Sequence[str | Path]) -> list[Stamp | None]:
    """Returns the stamps of files that belong together; waits up to 1 s if some of them are there and others not.

    Args:
        paths: paths of the files.

    Returns:
        The stamp of each file; None for one that does not exist.
    """
    found = [stamp_of(path) for path in paths]
    deadline = time.monotonic() + _SECONDS
    while None in found:
        for folder in {os.path.dirname(path) or "." for path in paths}:
            look_again_in(folder)
        found = [stamp_of(path) for path in paths]
        if found.count(None) in (0, len(found)) or time.monotonic() >= deadline:
            return found
        check_cancelled()
        time.sleep(_GAP_SECONDS)
    return found
