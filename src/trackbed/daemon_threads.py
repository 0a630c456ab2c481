"""Threads for calls that may block forever and ignore Ctrl-C: the caller can stop waiting, and the program can end.

The executors of `concurrent.futures` join their threads when the interpreter ends, which may then take forever.
"""

import contextlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, NoReturn, Self, TypeVar

_Result = TypeVar("_Result")
_POLL_SECONDS: Final = 0.1
_NAME: Final = "trackbed uninterruptible"
_Calls = queue.SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


class DaemonThreads:
    """Threads that make calls in the order in which they are submitted.

    They start when calls are submitted, and end after `end`, or with the last reference to this object.

    Args:
        name: name of the threads.
        num_threads: most threads, at least 1.
    """

    def __init__(self, name: str, *, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._started: list[threading.Thread] = []
        self._calls: _Calls = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()

    def submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """Schedules a call after all earlier ones. At the end of the interpreter, which starts no thread, makes it."""
        future: Future[_Result] = Future()
        if self.has_thread():
            self._calls.put((future, call))
        else:
            _fulfil(future, call)
        return future

    def has_thread(self) -> bool:
        """Starts a thread if there may be more. Returns False if there is none, as the interpreter is about to end."""
        return (len(self._started) < self._num_threads and self._start_one()) or bool(self._started)

    def _start_one(self) -> bool:
        """Starts a further thread. Returns False if the interpreter allows none any more."""
        if not self._started:
            weakref.finalize(self, _end, self._calls, self._num_threads).atexit = False
        thread = threading.Thread(target=_serve, args=(self._calls,), daemon=True, name=self._name)
        if _can_start(thread):
            self._started.append(thread)
            return True
        return False

    def end(self) -> None:
        """Ends the threads after the calls that were submitted. Does not wait for them."""
        _end(self._calls, self._num_threads)

    def shut_down(self) -> None:
        """Ends the threads: cancels calls that have not begun, and waits for those that have.

        Unlike the executors of `concurrent.futures`, these threads work also while the interpreter waits, at its end,
        for the thread that uses them.
        """
        with contextlib.suppress(queue.Empty):
            while (item := self._calls.get_nowait()) is not None:
                item[0].cancel()
        self.end()
        for thread in self._started:
            thread.join()


def call_on_thread(call: Callable[[], _Result], name: str) -> "Future[_Result]":
    """Makes one call on a thread of its own, which ends with it; here, where the interpreter starts no thread."""
    future: Future[_Result] = Future()
    if not _can_start(threading.Thread(target=_fulfil, args=(future, call), daemon=True, name=name)):
        _fulfil(future, call)
    return future


def run_in_thread(work: Callable[[], _Result]) -> _Result:
    """Runs `work` in a thread, so that signals reach the caller. Returns its result, or raises its error."""
    future = call_on_thread(work, _NAME)
    # A signal that arrives just before a wait does not interrupt it, so every wait is short.
    while not wait([future], timeout=_POLL_SECONDS).done:
        pass
    return future.result()


def exit_if_busy(code: int) -> None:
    """Exits at once if a thread of `run_in_thread` still runs, as a regular shutdown of the interpreter would crash."""
    if any(thread.name == _NAME for thread in threading.enumerate()):
        exit_at_once(code)


def exit_at_once(code: int) -> NoReturn:
    """Exits without a regular shutdown of the interpreter, after all that was printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _can_start(thread: threading.Thread) -> bool:
    """Starts a thread. False if it cannot, as at the end of the interpreter from Python 3.12 on."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True


def _end(calls: _Calls, num_threads: int) -> None:
    for _ in range(num_threads):
        calls.put(None)


def _serve(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        _fulfil(*item)
        del item  # an idle thread must not keep the objects of the last call alive


def _fulfil(future: "Future[Any]", call: Callable[[], Any]) -> None:
    # From here on the future cannot be cancelled: setting a result would otherwise raise, and end the thread.
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001  raised where the result is asked for
        future.set_exception(error)
