"""Thread for calls that may block forever, so that the caller can stop waiting for them."""

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

__all__ = ["Worker"]

T = TypeVar("T")

_EXIT_SECONDS: Final = 2.0
_Task = tuple[Future[Any], Callable[[], Any]]
_Tasks = queue.SimpleQueue[_Task | None]
_running: Final[set[Future[Any]]] = set()
"""Results of the calls that run now."""


class Worker:
    """Thread that makes calls one after the other.

    For calls into libraries that may block forever and ignore Ctrl-C. The thread starts with the first call and ends
    with the last reference to the worker; it keeps the process from ending for at most two seconds.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str = "trackbed-store") -> None:
        self._name = name
        self._tasks: _Tasks = queue.SimpleQueue()
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


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        future, call = task
        _running.add(future)
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            future.set_exception(error)
        _running.discard(future)
        # An idle thread must not keep the objects of the last call alive.
        del task, future, call


@atexit.register
def _wait_for_calls() -> None:
    """Waits a moment for calls that are running: one that returns while the interpreter ends would abort the process.

    Before Python 3.14, a thread that asks for the interpreter then is unwound through the C++ code that called it.
    """
    wait(list(_running), _EXIT_SECONDS)


os.register_at_fork(after_in_child=_running.clear)  # a child has no such threads
