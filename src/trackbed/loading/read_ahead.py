"""Prefetching: items of an iterator on a background thread, and bytes of batches that lie in object stores.

Bytes are fetched for groups of batches, so that ranges of several of them are joined; while one group is gathered, the
next one is in flight.
"""

import _thread
import atexit
import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import numpy as np

from trackbed.cancellation import Flag
from trackbed.datasets.batches.reader import ReadsBatches
from trackbed.errors import ArgumentError
from trackbed.files.stores.waiting import LeftError, WaitingPool, ends_with, result_of
from trackbed.kernels import FetchedBytes
from trackbed.tokens.stored.budget import BUDGET

Item = TypeVar("Item")
_END: Final = object()
_END_SECONDS: Final = 0.1
"""Interval at which the end of the thread is polled, in case its notification was lost."""
_IDLE_SECONDS: Final = 200e-6
"""Time after the last take at which the consumer counts as busy elsewhere; several times the wakeup time of a
thread."""
_MOST_SECONDS: Final = 10 * _IDLE_SECONDS
"""Largest interval between two checks of that time."""


@dataclass(frozen=True, slots=True)
class _IteratorError:
    """An error that ended the iterator."""

    error: BaseException


class ReadAhead(Generic[Item]):
    """The items of an iterator, prefetched by a background thread.

    If the thread has not started an item, the consumer computes it inline, which is faster than waiting for the thread.
    The thread therefore starts only after the consumer has taken nothing for 0.2 ms, which it detects within 2 ms. An
    error of the iterator is raised in place of the item. The thread ends with this object, at the latest when the
    program exits.

    Args:
        make: returns the iterator. Thread and consumer advance it in turn, never at the same time.
        depth: number of items to prefetch, at least 1.
        on_end: called when the thread is to end, so that an item which takes long can be given up.
    """

    def __init__(
        self, make: Callable[[], Iterator[Item]], depth: int, *, on_end: Callable[[], object] = lambda: None
    ) -> None:
        self._queue = _Queue(make, depth, on_end)
        self._process = os.getpid()
        self._is_over = False
        self.has_exited = False
        """True once the program exits: the interpreter then takes modules apart, and little can be called."""
        # Ends the thread if the constructor is interrupted, as the caller then has no object to close.
        weakref.finalize(self, self._queue.end).atexit = False
        _LIVE.add(self)
        # Ctrl-C inside `Thread.start` may leave a thread waiting for a lock forever. Python delivers Ctrl-C to the main
        # thread only, so `Thread.start` is called on another one.
        _thread.start_new_thread(_start, (self._queue,))

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """Returns the next item, and waits for it if necessary."""
        # A fork has the queue and not the thread: its lock may be held for ever by a thread that does not exist there.
        if self._process != os.getpid():
            raise ArgumentError(
                "prefetched items must be used in the process that created them, found a fork of it: iterate again"
            )
        if self._is_over:
            raise StopIteration
        item = self._queue.take()
        if item is _END or isinstance(item, _IteratorError):
            self.close()
            if isinstance(item, _IteratorError):
                raise item.error
            raise StopIteration
        return item  # type: ignore[return-value]  # the queue holds nothing else

    def close(self) -> bool:
        """Ends the thread after its current item, and waits for it. May be called more than once.

        Returns:
            True if the thread has ended. False if it is the calling thread, which happens if this object is
            garbage-collected there; it then ends after its current item. False, too, once the program exits.
        """
        if not self._is_over:
            if self._process == os.getpid():
                self._queue.end()
                if self._queue.thread is threading.current_thread():
                    return False
                self._queue.await_end()
                self._queue.close_items()
            self._is_over = True
            self._queue = _Queue(lambda: iter(()), 0, lambda: None)  # drops prefetched items
        return not self.has_exited

    def end(self) -> None:
        """Ends the thread after its current item, without waiting for it."""
        self._queue.end()


class _Queue:
    """Queue of items between the consumer and the prefetch thread.

    Args:
        make: returns the iterator.
        depth: number of items to prefetch.
        on_end: called by `end`.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], depth: int, on_end: Callable[[], object]) -> None:
        self._make = make
        self._on_end = on_end
        self._depth = depth
        self._items: Iterator[Any] | None = None
        self._ready: deque[object] = deque()
        self._lock = threading.Lock()
        """Held while an item is computed."""
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._is_awake = True
        """True if the thread will check the number of ready items again without a wakeup."""
        self._taken_at = -math.inf
        """Time at which an item was last taken."""
        self._is_over = False
        self._has_ended = False
        self._ended: SimpleQueue[None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        """The prefetch thread, once it runs."""

    def take(self) -> object:
        """Returns the next item, a `_IteratorError`, or `_END`."""
        # Without the lock, which the thread holds while it computes the item after this one.
        try:
            item = self._ready.popleft()
        except IndexError:
            with self._lock:
                # The thread may have added the item while this one waited for the lock; to compute another one would
                # swap the two.
                item = self._ready.popleft() if self._ready else self._next()
        self._taken_at = time.perf_counter()
        if not self._is_awake:
            self._is_awake = True
            self._wakeups.put(None)
        return item

    def serve(self) -> None:
        """Prefetch items until `end` is called. Runs on the prefetch thread."""
        self.thread = threading.current_thread()
        try:
            while not self._is_over:
                self._fill_up()
                # Cleared before the items are counted: a consumer that takes one in between finds it cleared, and sends
                # a wakeup. In the other order, it would send none, and the thread would sleep beside an empty queue.
                self._is_awake = False
                if len(self._ready) >= self._depth:  # else an item was taken before `_is_awake` was cleared
                    self._wakeups.get()
        finally:
            self.note_end()

    def note_end(self) -> None:
        """Record that the thread has ended, and wake `await_end`."""
        self._has_ended = True
        self._ended.put(None)

    def await_end(self) -> None:
        """Waits until the thread has ended. May be interrupted and called again."""
        while not self._has_ended:
            with contextlib.suppress(Empty):
                self._ended.get(timeout=_END_SECONDS)
        if self.thread is not None:
            self.thread.join()  # returns at once

    def close_items(self) -> None:
        """Closes the iterator, if it is a generator, so that it frees what it holds. The thread has ended."""
        if isinstance(self._items, Generator):
            self._items.close()

    def _fill_up(self) -> None:
        seconds = _IDLE_SECONDS
        while len(self._ready) < self._depth and not self._is_over:
            if time.perf_counter() - self._taken_at < _IDLE_SECONDS:
                time.sleep(seconds)
                seconds = min(2 * seconds, _MOST_SECONDS)
            else:
                self._add()

    def end(self) -> None:
        """Ends the thread after its current item."""
        # The flag first: a thread that is woken, or whose item is given up, must not begin another one.
        self._is_over = True
        self._on_end()
        self._wakeups.put(None)

    def _add(self) -> None:
        with self._lock:
            # The end may have come while this thread waited for the lock.
            if not self._is_over:
                self._ready.append(self._next())

    def _next(self) -> object:
        try:
            if self._items is None:
                self._items = self._make()
            return next(self._items, _END)
        except BaseException as error:  # noqa: BLE001  raised again in place of the item
            return _IteratorError(error)


def _start(queue: _Queue) -> None:
    """Starts the prefetch thread."""
    try:
        threading.Thread(target=queue.serve, name="trackbed-ahead", daemon=True).start()
    except RuntimeError:  # too many threads: the consumer computes every item inline
        queue.note_end()


_LIVE: "weakref.WeakSet[ReadAhead[Any]]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Ends all prefetch threads: the interpreter cannot stop a thread that is inside a kernel."""
    for one in list(_LIVE):
        one.close()
        one.has_exited = True


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
