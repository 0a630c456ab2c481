"""Python's collector of cycles, paused while a plan makes many objects at once."""

import gc
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_pauses: Final[deque[None]] = deque()
"""One for each block that has paused the collector."""


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses the collector, unless the program has switched it off. A decorator, too.

    It would look at each of the hundred thousands of objects of a plan several times, and find none to free: that took
    a third of a load of 20,000 tensors.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _pauses.append(None)
    try:
        yield
    finally:
        _pauses.pop()
        gc.enable()


def _resume_in_child() -> None:
    """A forked process has no thread that would end the pause of its parent."""
    if _pauses:
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)
