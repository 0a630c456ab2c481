"""Callbacks that running kernels poll, for progress and cancellation."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["Poll", "current_poll", "poll_now", "polling"]

Callback = Callable[[int], object]

Poll = Callback | None
"""Progress callback of a kernel, called at least every 50 ms with the number of items done. An exception that it raises
ends the kernel, whose outputs are then undefined. Ctrl-C ends a kernel with or without a callback."""

_CALLBACK: ContextVar[Callback | None] = ContextVar("callback", default=None)


@contextlib.contextmanager
def polling(callback: Callback) -> Iterator[None]:
    """Context in which every kernel calls `callback`, in addition to its own poll and to those of outer contexts.

    Kernels run deep inside constructors with fixed signatures; this lets the caller of a constructor cancel them.
    """
    token = _CALLBACK.set(_both(_CALLBACK.get(), callback))
    try:
        yield
    finally:
        _CALLBACK.reset(token)


def current_poll(poll: Poll) -> Poll:
    """The callback for a kernel with its own `poll`: that and those of the context."""
    outer = _CALLBACK.get()
    return outer if poll is None else _both(outer, poll)


def poll_now(done: int = 0) -> None:
    """Call the callbacks of the context, as a kernel would. For loops over many short operations.

    Raises:
        Exception: an exception of a callback, which must be propagated.
    """
    callback = _CALLBACK.get()
    if callback is not None:
        callback(done)


def _both(first: Callback | None, second: Callback) -> Callback:
    if first is None:
        return second

    def call_both(done: int) -> None:
        first(done)
        second(done)

    return call_both
