"""Requests to a store: attempts until a time limit, on one event loop for the whole process.

The loop runs on a thread of its own.
"""

import asyncio
import atexit
import contextlib
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores.address import Address, redact
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


class ReplacedError(StoreError):
    """An object is not the one that was opened."""


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


ATTEMPTS_IN_TIME: Final = 4
"""Attempts that the time of a call is enough for, if each stalls."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_MOST_SHOWN: Final = 300
_ANSWER: Final = re.compile(r"status code: (\d{3}[A-Za-z ]*)")
_CODE: Final = re.compile(r"<Code>(\w+)</Code>")
_PASSING_STATUSES: Final = (408, 425, 429)
"""Statuses below 500 that a further attempt may change."""
_FINAL_NAMES: Final = (
    "AlreadyExistsError",
    "InvalidPathError",
    "NotSupportedError",
    "PermissionDeniedError",
    "PermissionError",
    "UnauthenticatedError",
    "UnknownConfigurationKeyError",
    "ValueError",
)
_NO_BUCKET: Final = "NoSuchBucket"
_FINAL_WORDS: Final = ("redirect", "StartTooLarge")


class WrongAnswerError(Exception):
    """An answer is not what was asked for; the message must not contain secrets."""


async def retry_until(deadline: float, request: Callable[[], Awaitable[_Result]], address: Address) -> _Result:
    """Makes a request, and makes it again while it fails in a way that may pass.

    Args:
        deadline: time of `time.monotonic` at which it is given up.
        request: makes one attempt.
        address: the object, for errors.
    """
    pause, last = _FIRST_PAUSE, "no answer"
    while True:
        try:
            # The limits of the client begin anew with each attempt; the deadline is that of the whole call. Without it,
            # an attempt that begins late would keep the program beyond its time.
            async with asyncio.timeout_at(deadline):
                return await request()
        except (StoreError, ArgumentError, TypeError, AttributeError):
            raise
        except Exception as error:  # noqa: BLE001 - obstore's errors have no common class, and quote URLs
            final, last = _final_error(error, address), _describe(error) if str(error) else last
        # Outside of the handler, so that no error carries obstore's, which quotes headers and URLs.
        if final is not None:
            raise final
        # At random, so that the ranks of a job, which a store has refused at the same moment, do not all come back at
        # the same moment again.
        pause = min(2 * pause, _LONGEST_PAUSE)
        wait = pause * random.uniform(0.5, 1)
        # No attempt would end in time after this pause: the error is raised now, with the last failure.
        if time.monotonic() + wait >= deadline:
            raise OutOfTimeError(address.text, last)
        await asyncio.sleep(wait)


async def make_once(request: Callable[[], Awaitable[_Result]], address: Address) -> _Result:
    """Makes a request that the library repeats by itself."""
    try:
        return await request()
    except (StoreError, ArgumentError):
        raise
    except Exception as error:  # noqa: BLE001 - as above
        final = _final_error(error, address) or StoreError(
            f"{address.text}: the store must do what it is asked for, found: {_describe(error)}"
        )
    raise final


def is_forbidden(error: Exception) -> bool:
    """True if the store refuses the request, without a reason."""
    return _status(error) == 403 and _CODE.search(str(error)) is None


def is_missing_object(error: Exception) -> bool:
    """True if the store has no such object, but the bucket."""
    return isinstance(error, FileNotFoundError) and _NO_BUCKET not in str(error)


def is_out_of_range(error: Exception) -> bool:
    """True if the store says that a range begins after the end of the object."""
    return _status(error) == 416 or "StartTooLarge" in str(error)


def _final_error(error: Exception, address: Address) -> Exception | None:
    """Returns the error to raise if a further attempt would fail, too."""
    name, status, text = type(error).__name__, _status(error), _describe(error)
    if isinstance(error, FileNotFoundError) and _NO_BUCKET in str(error):
        return StoreError(f"{address.root}: the bucket must be there, but is not")
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(2, "there is no such object", address.text)
    if name == "PreconditionError" or status == 412:
        return replaced(address)
    if (
        name in _FINAL_NAMES
        or (status is not None and status < 500 and status not in _PASSING_STATUSES)
        or any(word in str(error) for word in _FINAL_WORDS)
    ):
        return StoreError(f"{address.text}: the store must grant the request, found: {text}")
    return None


def replaced(address: Address) -> "ReplacedError":
    """Returns the error for an object that has another stamp than the one that was opened."""
    return ReplacedError(f"{address.text}: the object must be the one that was opened, found another one in its place")


def _status(error: Exception) -> int | None:
    found = _ANSWER.search(str(error))
    return int(found[1][:3]) if found else None


def _describe(error: Exception) -> str:
    """Returns one line of an error, without secrets.

    Of an answer, only status and code: its text may repeat what was signed, and by which key.
    """
    answered = _ANSWER.search(str(error))
    if answered is not None:
        code = _CODE.search(str(error))
        return f"status {answered[1].strip()}" + (f", {code[1]}" if code else "")
    text = str(error).split("Debug source:")[0]
    return redact(" ".join(text.split()))[:_MOST_SHOWN] or type(error).__name__
