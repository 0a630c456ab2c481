"""Work in libraries that let no signal through until they are done."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

__all__ = ["leave", "run_in_thread"]

_LOOK_SECONDS: Final = 0.1
_NAME: Final = "trackbed work that hears no signals"

Result = TypeVar("Result")


def run_in_thread(work: Callable[[], Result]) -> Result:
    """The result of `work`, or what it raises. Signals reach whoever calls this, and leave the work alone."""
    future: Future[Result] = Future()
    threading.Thread(target=_fulfil, args=(future, work), name=_NAME, daemon=True).start()
    # A signal that comes just before a wait begins would not end it, so that no wait may be long.
    while not wait([future], timeout=_LOOK_SECONDS).done:
        pass
    return future.result()


def leave(code: int) -> None:
    """End the process at once if work is left in a thread: an interpreter that shuts down around it crashes."""
    if any(thread.name == _NAME for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fulfil(future: "Future[Result]", work: Callable[[], Result]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  it crosses to the thread that waits
        future.set_exception(error)
