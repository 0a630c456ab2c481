"""Items made ahead, on a thread of its own."""

import atexit
import os
import threading
import weakref
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
    """What ended the thread."""

    error: BaseException


class ReadAhead(Generic[Item]):
    """The items of an iterator, which a thread goes through ahead of whoever takes them.

    What the iterator raises is raised where the item would have been taken. Ends with its thread, at the latest when
    the program does.

    Args:
        make: gives the iterator; called on the thread.
        depth: items that are made, or being made, before they are asked for, at least 1.
    """

    def __init__(self, make: Callable[[], Iterator[Item]], depth: int) -> None:
        self._ready: SimpleQueue[object] = SimpleQueue()
        self._wanted: SimpleQueue[None] = SimpleQueue()
        self._stop = threading.Event()
        self._process = os.getpid()
        self._is_over = False
        for _ in range(depth):
            self._wanted.put(None)
        self._thread = threading.Thread(
            target=_serve, args=(make, self._wanted, self._stop, self._ready), name="trackbed-ahead", daemon=True
        )
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
        item = self._ready.get()
        if item is _END or isinstance(item, _Failure):
            self.close()
            if isinstance(item, _Failure):
                raise item.error
            raise StopIteration
        self._wanted.put(None)
        return item  # type: ignore[return-value]  # the queue holds nothing else

    def close(self) -> None:
        """End the thread, once the item that it is at is made. May be called again."""
        if not self._is_over:
            self._is_over = True
            if self._process == os.getpid():
                self._stop.set()
                self._wanted.put(None)
                self._thread.join()
            self._ready = SimpleQueue()  # lets go of what nobody took


def _serve(
    make: Callable[[], Iterator[Item]],
    wanted: "SimpleQueue[None]",
    stop: threading.Event,
    ready: "SimpleQueue[object]",
) -> None:
    try:
        items = make()
        while wanted.get() is None and not stop.is_set():
            ready.put(next(items, _END))
    except BaseException as error:  # noqa: BLE001  it is raised where the item would have been taken
        ready.put(_Failure(error))


_LIVE: "weakref.WeakSet[ReadAhead[Any]]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread inside a kernel cannot be ended by the interpreter."""
    for one in list(_LIVE):
        one.close()
