"""Limit on the bytes of `.bin` objects that a process holds, of all datasets and threads together."""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Final

from trackbed.cancellation import check_cancelled

__all__ = ["BUDGET", "FetchBudget"]

_POLL_SECONDS: Final = 0.02


class FetchBudget:
    """Bytes that are in flight or were fetched, and their limit. Whoever needs more than is free waits.

    Something larger than the limit gets it alone.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._limit: int | None = getattr(self, "_limit", None)
        self._held = 0
        self._freed = threading.Condition()

    @property
    def limit(self) -> int:
        """Most bytes to be held; without limit, the largest number of 63 bits."""
        return self._limit if self._limit is not None else (1 << 63) - 1

    def lower(self, limit: int) -> None:
        """Lowers the limit, which is the smallest of all values given."""
        self._limit = limit if self._limit is None else min(self._limit, limit)

    @contextlib.contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Holds so many bytes; waits until they are free.

        Raises:
            Exception: the poll of the caller raised it.
        """
        wanted = min(size_bytes, self.limit)
        with self._freed:
            while self._held and self._held + wanted > self.limit:
                self._freed.wait(_POLL_SECONDS)
                check_cancelled()
            self._held += wanted
        try:
            yield
        finally:
            with self._freed:
                self._held -= wanted
                self._freed.notify_all()


BUDGET: Final = FetchBudget()
"""The budget of this process."""
