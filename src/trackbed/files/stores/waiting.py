"""Waits for a store, which look for Ctrl-C and for failures of other ranks."""

import math
import time
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

from trackbed.cancellation import check_cancelled

__all__ = ["LOOK_SECONDS", "is_done_by", "result_of"]

_Result = TypeVar("_Result")
LOOK_SECONDS: Final = 0.05
"""Seconds between two looks."""


def is_done_by(deadline: float, future: "Future[Any]") -> bool:
    """Waits until a future is done, or until `deadline`, a time of `time.monotonic`. Returns True if it is done.

    Raises:
        Exception: the poll of the caller raised it.
    """
    while not future.done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if not wait([future], timeout=min(left, LOOK_SECONDS)).done:
            check_cancelled()
    return True


def result_of(future: "Future[_Result]") -> _Result:
    """Waits for a future, and returns its result.

    Raises:
        Exception: the call, or the poll of the caller, raised it.
    """
    is_done_by(math.inf, future)
    return future.result()
