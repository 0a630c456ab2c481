"""Batches whose bytes come from an object store: several are gathered together, as each waits for the store."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextvars import copy_context
from typing import Final, TypeVar

from trackbed.cancellation import check_cancelled, polling

__all__ = ["gather_ahead"]

_Job = TypeVar("_Job")
_Made = TypeVar("_Made")
_MOST: Final = 32
"""Most batches that are gathered together."""
_POLL_SECONDS: Final = 0.05
_WEIGHT: Final = 0.25
"""Weight of the last batch in the averages of the two times."""


class _LeftError(Exception):
    """The iteration was left."""


def gather_ahead(
    jobs: Iterable[_Job], gather: Callable[[_Job], _Made], *, most: Callable[[], int]
) -> Generator[tuple[_Job, _Made]]:
    """Yields each job with its batch, in order.

    As many are gathered together as batches are taken while one is gathered, and one more; both times are measured.

    Args:
        jobs: what is to be gathered, taken as it is needed.
        gather: gathers a batch; called on several threads.
        most: called for the most batches to gather together, at least 1.

    Raises:
        Exception: an error of `jobs` or of `gather`, raised in place of the batch that it affects.
    """
    left = threading.Event()

    def work(job: _Job) -> tuple[_Made, float]:
        def poll(_done: int) -> None:
            if left.is_set():
                raise _LeftError

        started = time.perf_counter()
        with polling(poll):
            return gather(job), time.perf_counter() - started

    source, failure = iter(jobs), None
    pending: deque[tuple[_Job, Future[tuple[_Made, float]]]] = deque()
    pace = _Pace()
    pool = ThreadPoolExecutor(_MOST, thread_name_prefix="trackbed-gather")
    try:
        while True:
            while failure is None and len(pending) < min(pace.depth, most(), _MOST):
                try:
                    job = next(source)
                except BaseException as error:  # noqa: BLE001  raised after the batches before it
                    failure = error
                    break
                pending.append((job, pool.submit(copy_context().run, work, job)))
            if not pending:
                if failure is not None and not isinstance(failure, StopIteration):
                    raise failure
                return
            job, future = pending.popleft()
            batch, seconds = _await(future)
            pace.made(seconds)
            yield job, batch
            del batch
            pace.taken()
    finally:
        left.set()
        pool.shutdown(wait=False, cancel_futures=True)


class _Pace:
    """Times of gathering a batch, and between two batches that are taken."""

    def __init__(self) -> None:
        self._gather_seconds = 0.0
        self._period_seconds = 0.0
        self._taken_at: float | None = None

    @property
    def depth(self) -> int:
        """Number of batches to gather together."""
        if not self._period_seconds:
            return 2
        return 1 + max(1, math.ceil(self._gather_seconds / self._period_seconds))

    def made(self, seconds: float) -> None:
        """Records how long a batch took."""
        self._gather_seconds = _average(self._gather_seconds, seconds)

    def taken(self) -> None:
        """Records that a batch was taken."""
        now = time.perf_counter()
        if self._taken_at is not None:
            self._period_seconds = _average(self._period_seconds, now - self._taken_at)
        self._taken_at = now


def _average(before: float, now: float) -> float:
    return now if not before else (1 - _WEIGHT) * before + _WEIGHT * now


def _await(future: "Future[_Made]") -> _Made:
    while True:
        try:
            return future.result(timeout=_POLL_SECONDS)
        except FutureTimeoutError:
            if future.done():
                return future.result()
            check_cancelled()
