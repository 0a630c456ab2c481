"""Cancellation of long work: callbacks that kernels and loops poll, and that end them by raising."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_Callback = Callable[[int], object]

Poll = _Callback | None
"""Called with the number of items that are done, at least every 50 ms. If it raises, the kernel ends, and its outputs
are undefined. Ctrl-C ends a kernel with or without one."""


class Flag:
    """A flag that threads look at: a `threading.Event` without waiting, and so without a lock.

    Ctrl-C inside `Event.set` may leave its lock taken, so that the next call never returns.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Sets the flag."""
        self._is_set = True

    def is_set(self) -> bool:
        """True once it has been set."""
        return self._is_set


_POLL: ContextVar[Poll] = ContextVar("poll", default=None)
_CHECKS: ContextVar[tuple[Callable[[], object], ...]] = ContextVar("checks", default=())


@contextlib.contextmanager
def polling(poll: _Callback) -> Iterator[None]:
    """Polls `poll` in every kernel inside the block, besides the kernel's own poll and those of outer blocks.

    Kernels run deep inside constructors with fixed signatures. This is how their caller ends them.
    """
    token = _POLL.set(_both(_POLL.get(), poll))
    try:
        yield
    finally:
        _POLL.reset(token)


def current_poll(poll: Poll) -> Poll:
    """Returns the callback for a kernel that was given `poll`: that one and the context's."""
    outer = _POLL.get()
    return outer if poll is None else _both(outer, poll)


def check_cancelled(done: int = 0) -> None:
    """Polls once, like a kernel does: for loops over many short steps.

    Raises:
        Exception: whatever the poll raises. It must propagate.
    """
    poll = _POLL.get()
    if poll is not None:
        poll(done)


@contextlib.contextmanager
def checking_waits(check: Callable[[], object]) -> Iterator[None]:
    """Calls `check` while this thread waits for other ranks inside the block. If it raises, the wait ends.

    Unlike a poll of `polling`, it sends no sign of life, and so does not keep others from finding out that all wait.
    """
    token = _CHECKS.set((*_CHECKS.get(), check))
    try:
        yield
    finally:
        _CHECKS.reset(token)


def check_wait() -> None:
    """Checks once, in a wait for other ranks.

    Raises:
        Exception: the error of a check. It must propagate.
    """
    for check in _CHECKS.get():
        check()


def _both(first: Poll, second: _Callback) -> _Callback:
    if first is None:
        return second

    def poll(done: int) -> None:
        first(done)
        second(done)

    return poll
