"""Bytes of batches that lie in object stores, fetched before the batches are gathered.

Batches are fetched in groups, so that ranges of several of them are joined; while one group is gathered, the next one
is in flight.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np

from trackbed.cancellation import Flag
from trackbed.datasets.batches.reader import ReadsBatches
from trackbed.files.stores.waiting import LeftError, WaitingPool, ends_with, result_of
from trackbed.kernels import FetchedBytes
from trackbed.tokens.stored.budget import BUDGET

_Job = TypeVar("_Job")
_WEIGHT: Final = 0.25
"""Weight of the last measurement in the averages of the two times."""
_NOTHING: Final = FetchedBytes()

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Fetched:
    """Bytes that were fetched for a group of batches."""

    content: FetchedBytes = _NOTHING
    size_bytes: int = 0
    seconds: float = 0.0
    is_too_large: bool = False
    """True if the group needs more bytes than may be fetched ahead, or failed; its batches are fetched one by one."""


def fetch_ahead(
    jobs: Iterable[_Job],
    dataset: ReadsBatches,
    left: Flag,
    *,
    indices_of: Callable[[_Job], Sequence[int]],
    together: Callable[[_Job], int],
) -> Generator[tuple[_Job, FetchedBytes], None, None]:
    """Yields each job with bytes for its batch, in order. Bytes that are missing are left to `gather`.

    A group has as many batches as are taken while a group is fetched (both times are measured), or as `together` says
    if that is more, within the half of the budget that may be fetched ahead.

    Args:
        jobs: batches, taken as they are needed.
        dataset: the dataset.
        left: ends all waits once it is set; set when the iteration ends.
        indices_of: returns the positions of a job.
        together: returns the number of batches whose ranges are close to each other, at least 1.
    """
    source, failure = iter(jobs), None
    groups: deque[tuple[list[_Job], Future[_Fetched]]] = deque()
    pace = _Pace()
    pool = WaitingPool(1, "trackbed-fetch", left=left)
    try:
        while True:
            while failure is None and len(groups) < 2:
                group: list[_Job] = []
                try:
                    while len(group) < pace.size:
                        group.append(next(source))
                        if len(group) == 1:
                            pace.together = together(group[0])
                except BaseException as error:  # noqa: BLE001  raised after the batches before it
                    failure = error
                if group:
                    indices = [indices_of(job) for job in group]
                    groups.append((group, pool.submit(partial(_fetch, dataset, indices))))
                    pace.grow()
            if not groups:
                if failure is not None and not isinstance(failure, StopIteration):
                    raise failure
                return
            group, future = groups[0]
            with ends_with(left):
                fetched = result_of(future)
            pace.fetched(fetched, len(group))
            for job in group:
                started = time.perf_counter()
                yield job, fetched.content
                pace.taken(time.perf_counter() - started)
            groups.popleft()
            BUDGET.free_ahead(fetched.size_bytes)
            del fetched
    finally:
        pool.leave()
        for _, future in groups:
            if not future.cancel():
                future.add_done_callback(_free)


def _fetch(dataset: ReadsBatches, indices: Sequence[Sequence[int]]) -> _Fetched:
    """Fetches the bytes of a group. An error is left to the batch that it affects, which meets it, too."""
    started = time.perf_counter()
    held = 0
    try:
        ranges = dataset.missing_ranges(np.concatenate([np.asarray(some, dtype=np.int64) for some in indices]))
        if ranges is None:
            return _Fetched()
        size_bytes = int((ranges[:, 2] - ranges[:, 1]).sum())
        if not BUDGET.hold_ahead(size_bytes):
            return _Fetched(is_too_large=True)
        held = size_bytes
        content = dataset.fetch(ranges)
    except LeftError:
        BUDGET.free_ahead(held)
        raise
    except Exception as error:  # noqa: BLE001  the batch raises it
        BUDGET.free_ahead(held)
        logger.debug("fetching ahead failed, its batches are fetched one by one: %s", error)
        return _Fetched(is_too_large=True)  # perhaps for the time that a call may take
    return _Fetched(content, held, time.perf_counter() - started)


def _free(future: "Future[_Fetched]") -> None:
    if not future.cancelled() and future.exception() is None:
        BUDGET.free_ahead(future.result().size_bytes)


class _Pace:
    """Number of batches in a group, from the times that fetching a group and using a batch take."""

    def __init__(self) -> None:
        self.size = 1
        self.together = 1
        self._most = 1 << 30
        self._fetch_seconds = 0.0
        self._use_seconds = 0.0

    def fetched(self, found: _Fetched, size: int) -> None:
        """Records a group that was fetched."""
        if found.is_too_large:
            self._most = max(1, min(self._most, size // 2))
            self.size = min(self.size, self._most)
        elif found.seconds:
            self._fetch_seconds = _average(self._fetch_seconds, found.seconds)

    def taken(self, seconds: float) -> None:
        """Records the time from one batch that was taken to the next one."""
        self._use_seconds = _average(self._use_seconds, seconds)

    def grow(self) -> None:
        """Sets the size of the next group, at most twice that of the last one."""
        wanted = max(2, self.together)
        if self._use_seconds:
            wanted = max(self.together, 1 + math.ceil(self._fetch_seconds / self._use_seconds))
        self.size = min(2 * self.size, wanted, self._most)


def _average(before: float, now: float) -> float:
    return now if not before else (1 - _WEIGHT) * before + _WEIGHT * now
