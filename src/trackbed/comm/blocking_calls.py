"""Thread for calls that may block forever, so that the caller can stop waiting for them."""

import atexit
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from trackbed.daemon_threads import DaemonThreads

T = TypeVar("T")

_EXIT_SECONDS: Final = 2.0
_running: Final[set[Future[Any]]] = set()
"""Results of the calls that have not ended."""


class Worker:
    """Thread that makes calls one after the other.

    For calls into libraries that may block forever and ignore Ctrl-C. The thread starts with the first call and ends
    with the last reference to the worker; it keeps the process from ending for at most two seconds.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str = "trackbed-store") -> None:
        self._threads = DaemonThreads(name)

    def has_thread(self) -> bool:
        """Starts the thread. Returns False if it cannot start, as the interpreter is about to end."""
        return self._threads.has_thread()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Schedules `call` after all earlier calls. Makes it at once where there is no thread."""
        future = self._threads.submit(call)
        _running.add(future)
        future.add_done_callback(_running.discard)  # now, if it has ended meanwhile
        return future


@atexit.register
def _wait_for_calls() -> None:
    """Waits a moment for calls that are running: one that returns while the interpreter ends would abort the process.

    Before Python 3.14, a thread that asks for the interpreter then is unwound through the C++ code that called it.
    """
    wait(list(_running), _EXIT_SECONDS)


os.register_at_fork(after_in_child=_running.clear)  # a child has no such threads
