"""One writer, or many readers; and a writer that does not wait.

Ctrl-C may interrupt a thread between any two steps. The lock therefore keeps the numbers of the threads that read or
write, and drops what an interrupted thread has left behind when that thread asks again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock, get_ident

__all__ = ["TableLock"]


class TableLock:
    """Guards tables that kernels read without Python's lock. A thread must not ask for it while it reads."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self._changed = Condition(self._mutex)
        self._readers: set[int] = set()
        """Threads that read."""
        self._waiting = 0
        self._writer = 0
        """The thread that writes; 0 for none."""
        self._depth = 0

    def begin_reading(self) -> None:
        """Keep writers out until `end_reading`."""
        me = get_ident()
        with self._mutex:
            if self._writer == me:  # left behind
                self._writer = self._depth = 0
            while self._writer:
                self._wait()
            self._readers.add(me)

    def end_reading(self) -> None:
        """End what `begin_reading` began, if it did."""
        with self._mutex:
            self._readers.discard(get_ident())
            self._notify()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside the block nobody else reads or writes."""
        me = get_ident()
        try:
            with self._mutex:
                self._readers.discard(me)  # left behind
                while self._readers or self._writer not in (0, me):
                    self._wait()
                self._writer, self._depth = me, 1
            yield
        finally:
            if self._writer == me:
                self.end_writing()

    def try_writing(self) -> bool:
        """Begin to write, up to `end_writing`, if nobody else reads or writes. Returns whether it has begun.

        A thread that writes already may begin once more.
        """
        me = get_ident()
        with self._mutex:
            if self._readers or self._writer not in (0, me):
                return False
            self._writer = me
            self._depth += 1
            return True

    def end_writing(self) -> None:
        """End what `try_writing` began."""
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
        if self._waiting:  # else this would cost more than the lock
            self._changed.notify_all()
