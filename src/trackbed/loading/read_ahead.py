"""Iterator that prefetches items on a background thread."""

import _thread
import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from trackbed.errors import ArgumentError

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
class _Failure:
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
        if self._process != os.getpid():
            raise ArgumentError(
                "prefetched items must be used in the process that created them, found a fork of it: iterate again"
            )
        if self._is_over:
            raise StopIteration
        item = self._queue.take()
        if item is _END or isinstance(item, _Failure):
            self.close()
            if isinstance(item, _Failure):
                raise item.error
            raise StopIteration
        return item  # type: ignore[return-value]  # the queue holds nothing else

    def close(self) -> bool:
        """Ends the thread after its current item, and waits for it. May be called more than once.

        Returns:
            True if the thread has ended. False if it is the calling thread, which happens if this object is
            garbage-collected there; it then ends after its current item.
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
        return True

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
        """Returns the next item, a `_Failure`, or `_END`."""
        try:
            item = self._ready.popleft()
        except IndexError:
            with self._lock:
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
        self._is_over = True
        self._on_end()
        self._wakeups.put(None)

    def _add(self) -> None:
        with self._lock:
            if not self._is_over:
                self._ready.append(self._next())

    def _next(self) -> object:
        try:
            if self._items is None:
                self._items = self._make()
            return next(self._items, _END)
        except BaseException as error:  # noqa: BLE001  raised again in place of the item
            return _Failure(error)


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
