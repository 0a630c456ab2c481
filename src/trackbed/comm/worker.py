"""Thread for calls that may block forever, so that the caller can stop waiting for them."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Worker"]

T = TypeVar("T")

_Task = tuple[Future[Any], Callable[[], Any]]


class Worker:
    """Thread that makes calls one after the other.

    For calls into libraries that may block forever and ignore Ctrl-C. The thread starts with the first call and ends
    with the last reference to the worker; it never keeps the process from ending.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str = "trackbed-store") -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._started = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Schedules `call` after all earlier calls."""
        if not self._started:
            self._started = True
            # The executors of concurrent.futures join their threads at exit, which may take forever.
            threading.Thread(target=_work, args=(self._tasks,), daemon=True, name=self._name).start()
            weakref.finalize(self, self._tasks.put, None).atexit = False
        future: Future[T] = Future()
        self._tasks.put((future, call))
        return future


def _work(tasks: "queue.SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        future, call = task
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            future.set_exception(error)
        # An idle thread must not keep the objects of the last call alive.
        del task, future, call
