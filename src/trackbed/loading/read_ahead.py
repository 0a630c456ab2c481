"""Items made ahead, on a thread of its own."""

import _thread
import atexit
import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from trackbed.errors import ArgumentError

__all__ = ["ReadAhead"]

Item = TypeVar("Item")
_END: Final = object()
_END_SECONDS: Final = 0.1
"""Between two looks whether a thread has ended, where nobody says so."""
_AWAY_SECONDS: Final = 200e-6
"""Whoever has been away for so long does something else meanwhile; some times as long as it takes to wake a thread."""
_MOST_SECONDS: Final = 10 * _AWAY_SECONDS
"""Between two looks whether he is away by now, if he never was."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """What ended the iterator."""

    error: BaseException


class ReadAhead(Generic[Item]):
    """The items of an iterator, which a thread goes through ahead of whoever takes them.

    Whoever takes an item that nobody is at makes it himself, which is quicker than to wait for a thread: so the thread
    begins only when he has been away for 0.2 ms, which it finds out within 2 ms. What the iterator raises is raised
    where the item would have been taken. Ends with its thread, at the latest when the program does.

    Args:
        make: gives the iterator, which one thread after the other goes on with.
        depth: items that are made before they are asked for, at least 1.
    """

    def __init__(self, make: Callable[[], Iterator[Item]], depth: int) -> None:
        self._line = _Line(make, depth)
        self._process = os.getpid()
        self._is_over = False
        # Whoever is interrupted before it has this object can close nothing: then the thread ends by itself.
        weakref.finalize(self, self._line.end).atexit = False
        _LIVE.add(self)
        # Ctrl-C inside `Thread.start` may leave a thread that waits for a lock for ever; it only comes to the main one.
        _thread.start_new_thread(_start, (self._line,))

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        """The next item; waits until it is made.

        Raises:
            ArgumentError: the process was forked since.
            StopIteration: there are no more.
        """
        if self._process != os.getpid():
            msg = "what is read ahead must be taken in the process that began it, found a fork of it: begin anew there"
            raise ArgumentError(msg)
        if self._is_over:
            raise StopIteration
        item = self._line.take()
        if item is _END or isinstance(item, _Failure):
            self.close()
            if isinstance(item, _Failure):
                raise item.error
            raise StopIteration
        return item  # type: ignore[return-value]  # the line holds nothing else

    def close(self) -> bool:
        """End the thread, once the item that it is at is made. May be called again.

        Returns:
            True if it has ended. False if it is the calling thread, which may collect whatever holds this object: then
            it ends as soon as it is back from its item.
        """
        if not self._is_over:
            if self._process == os.getpid():
                self._line.end()
                if self._line.thread is threading.current_thread():
                    return False
                self._line.await_end()
            self._is_over = True
            self._line = _Line(lambda: iter(()), depth=0)  # lets go of what nobody took
        return True

    def end(self) -> None:
        """Let the thread end, once the item that it is at is made, and do not wait for it."""
        self._line.end()


class _Line:
    """Items in their order, between the one who takes them and the thread that makes them.

    Args:
        make: gives the iterator.
        depth: items to be made ahead.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], depth: int) -> None:
        self._make = make
        self._depth = depth
        self._items: Iterator[Any] | None = None
        self._ready: deque[object] = deque()
        self._at_work = threading.Lock()
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._is_called = True
        """Whether the thread will look again how much is ready."""
        self._left_at = -math.inf
        """When an item was last taken."""
        self._is_over = False
        self._has_ended = False
        self._ended: SimpleQueue[None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        """The one that makes items, once it runs."""

    def take(self) -> object:
        """The next item, one that says what went wrong, or the end."""
        try:
            item = self._ready.popleft()
        except IndexError:
            with self._at_work:
                item = self._ready.popleft() if self._ready else self._next()
        self._left_at = time.perf_counter()
        if not self._is_called:
            self._is_called = True
            self._calls.put(None)
        return item

    def serve(self) -> None:
        """Make items, as long as nobody ends this."""
        self.thread = threading.current_thread()
        try:
            while not self._is_over:
                self._fill_up()
                self._is_called = False
                if len(self._ready) >= self._depth:  # else one was taken before this could be known
                    self._calls.get()
        finally:
            self.note_end()

    def note_end(self) -> None:
        """Let go of those who wait until no thread makes items."""
        self._has_ended = True
        self._ended.put(None)

    def await_end(self) -> None:
        """Return when no thread makes items any more; may be interrupted and called again."""
        while not self._has_ended:
            with contextlib.suppress(Empty):
                self._ended.get(timeout=_END_SECONDS)
        if self.thread is not None:
            self.thread.join()  # it has nothing left to do

    def _fill_up(self) -> None:
        seconds = _AWAY_SECONDS
        while len(self._ready) < self._depth and not self._is_over:
            if time.perf_counter() - self._left_at < _AWAY_SECONDS:
                time.sleep(seconds)
                seconds = min(2 * seconds, _MOST_SECONDS)
            else:
                self._add()

    def end(self) -> None:
        """Let the thread end, once the item that it is at is made."""
        self._is_over = True
        self._calls.put(None)

    def _add(self) -> None:
        with self._at_work:
            if not self._is_over:
                self._ready.append(self._next())

    def _next(self) -> object:
        try:
            if self._items is None:
                self._items = self._make()
            return next(self._items, _END)
        except BaseException as error:  # noqa: BLE001  it is raised where the item would have been taken
            return _Failure(error)


def _start(line: _Line) -> None:
    """Start the thread that makes items."""
    try:
        threading.Thread(target=line.serve, name="trackbed-ahead", daemon=True).start()
    except RuntimeError:  # there are too many threads: whoever takes an item makes it
        line.note_end()


_LIVE: "weakref.WeakSet[ReadAhead[Any]]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread inside a kernel cannot be ended by the interpreter."""
    for one in list(_LIVE):
        one.close()
