"""Looking in on a kernel while it runs."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["Poll", "current_poll", "look_in", "watched"]

Look = Callable[[int], object]

Poll = Look | None
"""Called with the number of items that are done, at least every 50 ms; what it raises ends the kernel, whose outputs
then mean nothing. Ctrl-C ends it with or without one."""

_WATCH: ContextVar[Look | None] = ContextVar("watch", default=None)


@contextlib.contextmanager
def watched(look: Look) -> Iterator[None]:
    """Inside the block, `look` looks in on every kernel, besides the kernel's own poll and besides those around it.

    Kernels run deep inside constructors whose signatures are fixed; this is how the one who calls them sees to it that
    they end when they are of no use any more.
    """
    token = _WATCH.set(_both(_WATCH.get(), look))
    try:
        yield
    finally:
        _WATCH.reset(token)


def current_poll(poll: Poll) -> Poll:
    """What a kernel that was given `poll` is to call."""
    watch = _WATCH.get()
    return watch if poll is None else _both(watch, poll)


def look_in(done: int = 0) -> None:
    """Do what `watched` does to a kernel: for loops around many things none of which is long.

    Raises:
        Exception: whatever the watch raises. It must go up.
    """
    watch = _WATCH.get()
    if watch is not None:
        watch(done)


def _both(first: Look | None, second: Look) -> Look:
    if first is None:
        return second

    def look(done: int) -> None:
        first(done)
        second(done)

    return look
