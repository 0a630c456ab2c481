"""Threads that wait for a store. Their calls end once the pool is left, and the program need not wait for them."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any, TypeVar

from trackbed.cancellation import Flag, check_cancelled, polling
from trackbed.files.stores.waiting import result_of

__all__ = ["LeftError", "WaitingPool", "call_all", "ends_with"]

_Result = TypeVar("_Result")
_Call = tuple[Context, Callable[[], Any], "Future[Any]"]


class LeftError(Exception):
    """The pool was left: the result of a call is not wanted any more."""


class WaitingPool:
    """Threads that end with the program, unlike those of `concurrent.futures`, for which it waits.

    Args:
        num_threads: at least 1.
        name: name of the threads.
        left: flag that ends the calls, and the threads; set by `leave`.
    """

    def __init__(self, num_threads: int, name: str, *, left: Flag | None = None) -> None:
        self._left = left or Flag()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            threading.Thread(target=_serve, args=(self._calls, self._left), name=name, daemon=True).start()

    def submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """Has a thread make a call, in a copy of the caller's context."""
        future: Future[_Result] = Future()
        self._calls.put((copy_context(), call, future))
        return future

    def leave(self) -> None:
        """Ends the calls at their next poll, and the threads. Does not wait for them."""
        self._left.set()
        for _ in range(self._num_threads):
            self._calls.put(None)


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


def _serve(calls: "queue.SimpleQueue[_Call | None]", left: Flag) -> None:
    def work(call: Callable[[], Any]) -> Any:
        with ends_with(left):
            check_cancelled()
            return call()

    while (item := calls.get()) is not None:
        context, call, future = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(context.run(work, call))
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(error)
