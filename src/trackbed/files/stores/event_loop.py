"""One event loop for all requests of a process, on a thread of its own."""

import asyncio
import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from trackbed.errors import StoreError
from trackbed.files.stores.waiting import is_done_by

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_GRACE_SECONDS: Final = 0.3
"""Seconds after its deadline in which a request reports its own error."""
_SILENT_SECONDS: Final = 10.0
"""Seconds after which a wait is told, and before it is told again."""
_CLOSE_SECONDS: Final = 1.0
_LEAVE_SECONDS: Final = 0.05
"""Seconds in which threads of obstore leave Python: they need microseconds, and the lock of the interpreter."""


class OutOfTimeError(StoreError):
    """The time of a request was not enough.

    Args:
        where: the address.
        found: the last failure of an attempt.
    """

    def __init__(self, where: str, found: str) -> None:
        self._parts = (where, found)
        super().__init__(f"{where}: the store must answer in time (TRACKBED_STORE_TIMEOUT), found: {found}")

    def __reduce__(self) -> tuple[type["OutOfTimeError"], tuple[str, str]]:
        """Copies and unpickles from the parts of the message."""
        return type(self), self._parts


class _Loop:
    """The event loop of this process, started when it is first used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._found is None:
                self._found = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._found.run_forever, name="trackbed-stores", daemon=True)
                self._thread.start()
            return self._found

    def close(self) -> None:
        """Cancels all requests, and waits until no thread of obstore is inside Python.

        Such a thread tells the loop that its request is done. If the interpreter ends meanwhile, the program aborts.
        """
        with self._lock:
            loop, thread = self._found, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(timeout=_CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_SECONDS)
        time.sleep(_LEAVE_SECONDS)


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_loop = _Loop()


def submit(work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
    """Starts requests on the event loop."""
    return asyncio.run_coroutine_threadsafe(work, _loop.get())


def result_by(deadline: float, future: Future[_Result], *, where: str) -> _Result:
    """Waits for requests, and returns their result. They are cancelled if the wait ends early.

    Args:
        deadline: time of `time.monotonic` at which they are given up.
        future: the requests.
        where: the address, for the error.
    """
    try:
        deadline += _GRACE_SECONDS
        if not is_done_by(min(deadline, time.monotonic() + _SILENT_SECONDS), future):
            _tell_waiting(where, deadline)
            if not is_done_by(deadline, future):
                raise OutOfTimeError(where, "no answer")
        return future.result()
    finally:
        future.cancel()


_told = -math.inf
"""Time of `time.monotonic` at which a wait was last told."""


def _tell_waiting(where: str, deadline: float) -> None:
    """Says that a wait takes long, for all waits of the process together at most once in `_SILENT_SECONDS`."""
    global _told  # noqa: PLW0603  the last one of all threads
    now = time.monotonic()
    if now - _told < _SILENT_SECONDS:
        return
    _told = now
    left = "" if deadline == math.inf else f", and waits for {deadline - now:.0f} s more (TRACKBED_STORE_TIMEOUT)"
    logger.warning("%s: no answer of the store for %.0f s%s: is the endpoint right?", where, _SILENT_SECONDS, left)


def run_until(deadline: float, work: Coroutine[Any, Any, _Result], *, where: str) -> _Result:
    """Runs requests, and returns their result; see `result_by`."""
    return result_by(deadline, submit(work), where=where)


def _forget_parent() -> None:
    global _loop  # noqa: PLW0603 - the thread of the parent's loop does not exist in a forked process
    _loop = _Loop()


os.register_at_fork(after_in_child=_forget_parent)


@atexit.register
def _close() -> None:
    _loop.close()
