"""A lock that many readers hold at once, or one writer alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Lock, get_ident

__all__ = ["TableLock"]


class TableLock:
    """Guards tables that kernels read without Python's lock. A thread must not ask for it while it reads."""

    def __init__(self) -> None:
        self._mutex = Lock()
        self._changed = Condition(self._mutex)
        self._readers = 0
        self._waiting = 0
        self._writer = 0
        """The thread that writes; 0 for none."""
        self._depth = 0

    def begin_reading(self) -> None:
        """Keep writers out until `end_reading`."""
        with self._mutex:
            while self._writer:
                self._wait()
            self._readers += 1

    def end_reading(self) -> None:
        """End what `begin_reading` began."""
        with self._mutex:
            self._readers -= 1
            self._notify()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside the block nobody else reads or writes."""
        with self._mutex:
            while self._readers or self._writer:
                self._wait()
            self._writer, self._depth = get_ident(), 1
        try:
            yield
        finally:
            self.end_writing()

    def try_writing(self) -> bool:
        """Begin to write if no other thread reads or writes. True if this thread writes now: `end_writing` follows.

        A thread that writes already may begin once more.
        """
        with self._mutex:
            if self._readers or self._writer not in (0, get_ident()):
                return False
            self._writer = get_ident()
            self._depth += 1
            return True

    def end_writing(self) -> None:
        """End what `try_writing` began."""
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                self._writer = 0
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
