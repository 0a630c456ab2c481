"""Items made ahead, on a thread of its own."""

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from trackbed.errors import ArgumentError

__all__ = ["ReadAhead"]

Item = TypeVar("Item")
_END: Final = object()


@dataclass(frozen=True, slots=True)
class _Failure:
    """What ended the iterator."""

    error: BaseException


class ReadAhead(Generic[Item]):
    """The items of an iterator, which a thread goes through ahead of whoever takes them.

    Whoever takes an item that nobody is at makes it himself, which is quicker than to wake a thread. What the iterator
    raises is raised where the item would have been taken. Ends with its thread, at the latest when the program does.

    Args:
        make: gives the iterator, which one thread after the other goes on with.
        depth: items that are made before they are asked for, at least 1.
    """

    def __init__(self, make: Callable[[], Iterator[Item]], depth: int) -> None:
        self._line = _Line(make)
        self._process = os.getpid()
        self._is_over = False
        for _ in range(depth):
            self._line.wanted.put(None)
        self._thread = threading.Thread(target=_serve, args=(self._line,), name="trackbed-ahead", daemon=True)
        _LIVE.add(self)
        self._thread.start()

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

    def close(self) -> None:
        """End the thread, once the item that it is at is made. May be called again."""
        if not self._is_over:
            self._is_over = True
            if self._process == os.getpid():
                self._line.is_over = True
                self._line.wanted.put(None)
                self._thread.join()
            self._line = _Line(lambda: iter(()))  # lets go of what nobody took


class _Line:
    """Items in their order, between the one who takes them and the thread that makes them.

    Args:
        make: gives the iterator.
    """

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.wanted: SimpleQueue[None] = SimpleQueue()
        self.is_over = False
        self._make = make
        self._items: Iterator[Any] | None = None
        self._ready: deque[object] = deque()
        self._at_work = threading.Lock()

    def take(self) -> object:
        """The next item, one that says what went wrong, or the end."""
        try:
            item = self._ready.popleft()
        except IndexError:
            with self._at_work:
                if not self._ready:
                    return self._next()
                item = self._ready.popleft()
        self.wanted.put(None)
        return item

    def add(self) -> None:
        """Make one item more."""
        with self._at_work:
            if not self.is_over:
                self._ready.append(self._next())

    def _next(self) -> object:
        try:
            if self._items is None:
                self._items = self._make()
            return next(self._items, _END)
        except BaseException as error:  # noqa: BLE001  it is raised where the item would have been taken
            return _Failure(error)


def _serve(line: _Line) -> None:
    while line.wanted.get() is None and not line.is_over:
        line.add()


_LIVE: "weakref.WeakSet[ReadAhead[Any]]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread inside a kernel cannot be ended by the interpreter."""
    for one in list(_LIVE):
        one.close()
