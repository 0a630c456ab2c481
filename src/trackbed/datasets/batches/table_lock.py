"""Readers-writer lock with an attempt to write that does not wait.

Ctrl-C may interrupt a thread between any two steps. The lock therefore stores the ids of the threads that hold it, and
drops a hold that an interrupted thread did not release when that thread acquires the lock again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock, get_ident

__all__ = ["TableLock"]


class TableLock:
    """Readers-writer lock for tables that kernels read without the GIL. A reader must not acquire it again."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self._changed = Condition(self._mutex)
        self._readers: set[int] = set()
        """Ids of the threads that read."""
        self._waiting = 0
        self._writer = 0
        """Id of the thread that writes; 0 for none."""
        self._depth = 0

    def begin_reading(self) -> None:
        """Acquires the lock for reading, until `end_reading`. Waits for a writer."""
        me = get_ident()
        with self._mutex:
            if self._writer == me:  # not released after an interrupt
                self._writer = self._depth = 0
            while self._writer:
                self._wait()
            self._readers.add(me)

    def end_reading(self) -> None:
        """Releases the lock for reading, if this thread holds it."""
        with self._mutex:
            self._readers.discard(get_ident())
            self._notify()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Holds the lock for writing inside the block. Waits for readers and for another writer."""
        me = get_ident()
        try:
            with self._mutex:
                self._readers.discard(me)  # not released after an interrupt
                while self._readers or self._writer not in (0, me):
                    self._wait()
                self._writer, self._depth = me, 1
            yield
        finally:
            if self._writer == me:
                self.end_writing()

    def try_writing(self) -> bool:
        """Acquires the lock for writing, until `end_writing`, without waiting. Returns True if it was acquired.

        A thread that holds the lock for writing may acquire it again.
        """
        me = get_ident()
        with self._mutex:
            if self._readers or self._writer not in (0, me):
                return False
            self._writer = me
            self._depth += 1
            return True

    def end_writing(self) -> None:
        """Releases the lock for writing."""
        with self._mutex:
            self._depth -= 1
            if self._depth <= 0:
                self._writer = self._depth = 0
                self._notify()

    def _wait(self) -> None:
        self._waiting += 1
        try:
            self._changed.wait()
        finally:
            self._waiting -= 1

    def _notify(self) -> None:
        if self._waiting:  # otherwise this would cost more than the lock
            self._changed.notify_all()
