"""A lock that many readers hold at once, or one writer alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, get_ident

__all__ = ["TableLock"]


class TableLock:
    """Guards tables that kernels read without Python's lock. A thread must not ask for it while it holds it."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._readers = 0
        self._writer = 0
        """The thread that writes; 0 for none."""
        self._depth = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside the block no table changes."""
        with self._condition:
            while self._writer:
                self._condition.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside the block nobody else reads or writes."""
        with self._condition:
            while self._readers or self._writer:
                self._condition.wait()
            self._writer, self._depth = get_ident(), 1
        try:
            yield
        finally:
            self.end_writing()

    def try_writing(self) -> bool:
        """Begin to write if no other thread reads or writes. True if this thread writes now: `end_writing` follows.

        A thread that writes already may begin once more.
        """
        with self._condition:
            if self._readers or self._writer not in (0, get_ident()):
                return False
            self._writer = get_ident()
            self._depth += 1
            return True

    def end_writing(self) -> None:
        """End what `try_writing` began."""
        with self._condition:
            self._depth -= 1
            if self._depth == 0:
                self._writer = 0
                self._condition.notify_all()
