"""One event loop for all requests of a process, on a thread of its own."""

import asyncio
import os
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, TypeVar

from trackbed.cancellation import check_cancelled
from trackbed.errors import StoreError

__all__ = ["run_until"]

_Result = TypeVar("_Result")
_LOOK_SECONDS: Final = 0.05
"""Seconds between two looks for Ctrl-C, and for failures of other ranks."""
_LOCK: Final = threading.Lock()
_LOOPS: Final[dict[int, asyncio.AbstractEventLoop]] = {}
"""The loop of this process, by its id; those of parents are left alone."""


def run_until(deadline: float, work: Coroutine[Any, Any, _Result], *, where: str) -> _Result:
    """Runs requests, and returns their result.

    Args:
        deadline: time of `time.monotonic` at which they are given up.
        work: the requests.
        where: the address, for the error.

    Raises:
        StoreError: the time is over, or this process was forked from one that has made requests.
        Exception: the requests, or the poll of the caller, raised it.
    """
    future: Future[_Result] = asyncio.run_coroutine_threadsafe(work, _loop(where))
    try:
        while True:
            left = deadline - time.monotonic()
            try:
                return future.result(timeout=max(0.0, min(left, _LOOK_SECONDS)))
            except FutureTimeoutError:
                if future.done():  # the requests raised a TimeoutError of their own
                    return future.result()
                if left <= 0:
                    msg = f"{where}: the store must answer in time (TRACKBED_STORE_TIMEOUT seconds), found no answer"
                    raise StoreError(msg) from None
            check_cancelled()
    finally:
        future.cancel()


def _loop(where: str) -> asyncio.AbstractEventLoop:
    with _LOCK:
        if _LOOPS and os.getpid() not in _LOOPS:
            msg = f"{where}: requests must not be made in a process that was forked from one that has made some"
            raise StoreError(msg)
        if os.getpid() not in _LOOPS:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="trackbed-stores", daemon=True).start()
            _LOOPS[os.getpid()] = loop
        return _LOOPS[os.getpid()]
