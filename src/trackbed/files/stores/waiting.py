"""Waits for a store, which look for Ctrl-C and for failures of other ranks, and threads that wait.

Calls on these threads end once the pool is left, and the program need not wait for them.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextvars import copy_context
from functools import partial
from typing import Any, Final, TypeVar

from trackbed.cancellation import Flag, check_cancelled, polling
from trackbed.daemon_threads import DaemonThreads

_Result = TypeVar("_Result")
LOOK_SECONDS: Final = 0.05
"""Seconds between two looks."""


def is_done_by(deadline: float, future: "Future[Any]") -> bool:
    """Waits until a future is done, or until `deadline`, a time of `time.monotonic`. Returns True if it is done."""
    # In short steps: a signal that arrives just before a wait does not end it, and a rank that waits for a store must
    # notice within a moment that another rank has failed.
    while not future.done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if not wait([future], timeout=min(left, LOOK_SECONDS)).done:
            check_cancelled()
    return True


def result_of(future: "Future[_Result]") -> _Result:
    """Waits for a future, and returns its result.

    Raises:
        Exception: the call, or the poll of the caller, raised it.
    """
    is_done_by(math.inf, future)
    return future.result()


class LeftError(Exception):
    """The pool was left: the result of a call is not wanted any more."""


class WaitingPool:
    """Threads that end with the program; it would wait for the threads of `concurrent.futures`.

    Args:
        num_threads: at least 1.
        name: name of the threads.
        left: flag that ends the calls, and the threads; set by `leave`.
    """

    def __init__(self, num_threads: int, name: str, *, left: Flag | None = None) -> None:
        self._left = left or Flag()
        self._threads = DaemonThreads(name, num_threads=num_threads)

    def submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """Has a thread make a call, in a copy of the caller's context."""
        return self._threads.submit(partial(copy_context().run, _call, self._left, call))

    def leave(self) -> None:
        """Ends the calls at their next poll, and the threads. Does not wait for them."""
        # The flag first: a thread that takes its next call before it ends must find that the call is not wanted.
        self._left.set()
        self._threads.end()


def call_all(calls: Sequence[Callable[[], _Result]], *, num_threads: int) -> list[_Result]:
    """Makes calls that may wait for a store, several of them at once, and returns their results in order.

    Looks for cancellation meanwhile. After the first error the others end at their next poll, and are not waited for.

    Raises:
        Exception: a call, or the poll of the caller, raised it.
    """
    if not calls:
        return []
    pool = WaitingPool(min(num_threads, len(calls)), "trackbed-calls")
    try:
        return [result_of(future) for future in [pool.submit(call) for call in calls]]
    finally:
        pool.leave()


@contextlib.contextmanager
def ends_with(left: Flag) -> Iterator[None]:
    """Ends waits for a store inside the block once `left` is set.

    Raises:
        LeftError: it was set.
    """

    def poll(_done: int) -> None:
        if left.is_set():
            raise LeftError

    with polling(poll):
        yield


def _call(left: Flag, call: Callable[[], _Result]) -> _Result:
    with ends_with(left):
        # A call that waited in the queue until the pool was left does not begin.
        check_cancelled()
        return call()
