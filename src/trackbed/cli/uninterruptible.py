"""Calls of libraries that block signals until they return."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Final, TypeVar

from trackbed.daemon_threads import call_on_thread

_POLL_SECONDS: Final = 0.1
_NAME: Final = "trackbed uninterruptible"

Result = TypeVar("Result")


def run_in_thread(work: Callable[[], Result]) -> Result:
    """Runs `work` in a thread, so that signals reach the caller. Returns its result, or raises its error."""
    future = call_on_thread(work, _NAME)
    # A signal that arrives just before a wait does not interrupt it, so every wait is short.
    while not wait([future], timeout=_POLL_SECONDS).done:
        pass
    return future.result()


def exit_if_busy(code: int) -> None:
    """Exits at once if such a thread still runs, as a regular shutdown of the interpreter would crash."""
    if any(thread.name == _NAME for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
