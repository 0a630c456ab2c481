"""Thread for calls that may block forever, so that the caller can stop waiting for them."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

__all__ = ["Worker"]

T = TypeVar("T")

_EXIT_SECONDS: Final = 2.0
_Task = tuple[Future[Any], Callable[[], Any]]
_Tasks = queue.SimpleQueue[_Task | None]
_queues: Final[dict[threading.Thread, _Tasks]] = {}
"""Tasks of each thread that runs."""


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
            thread = threading.Thread(target=_work, args=(self._tasks,), daemon=True, name=self._name)
            _queues[thread] = self._tasks
            thread.start()
            weakref.finalize(self, self._tasks.put, None).atexit = False
        future: Future[T] = Future()
        self._tasks.put((future, call))
        return future


def _work(tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        future, call = task
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            future.set_exception(error)
        # An idle thread must not keep the objects of the last call alive.
        del task, future, call
    _queues.pop(threading.current_thread(), None)


@atexit.register
def _end_threads() -> None:
    """Waits a moment for calls that are running: one that returns while the interpreter ends would abort the process.

    Before Python 3.14, a thread that asks for the interpreter then is unwound through the C++ code that called it.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    threads = list(_queues.items())
    for _, tasks in threads:
        tasks.put(None)
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
