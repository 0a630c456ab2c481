"""Limit on the bytes of `.bin` objects that a process holds, of all datasets and threads together."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

from trackbed.cancellation import check_cancelled

_POLL_SECONDS: Final = 0.005
_UNLIMITED: Final = (1 << 63) - 1


class FetchBudget:
    """Bytes that are in flight or were fetched, and their limit: one half for reads, one for what is fetched ahead.

    A read that needs more than is free waits for other reads, never for what was fetched ahead: that is used up by a
    loop which may itself have to read. Something larger than its half gets it alone.
    """

    def __init__(self) -> None:
        self._limit = _UNLIMITED
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._held = 0
        self._ahead = 0
        self._lock = threading.Lock()  # not a Condition: Ctrl-C inside the methods of one may leave it taken

    @property
    def half(self) -> int:
        """Most bytes of either half, at least 1."""
        return max(1, self._limit // 2)

    def lower(self, limit: int) -> None:
        """Lowers the limit, which is the smallest of all values given."""
        self._limit = min(self._limit, limit)

    @contextlib.contextmanager
    def held(self, size_bytes: int) -> Iterator[None]:
        """Holds bytes for a read; waits until they are free."""
        size = min(size_bytes, self.half)
        while not self._take(size):
            time.sleep(_POLL_SECONDS)
            check_cancelled()
        try:
            yield
        finally:
            with self._lock:
                self._held -= size

    def _take(self, size_bytes: int) -> bool:
        with self._lock:
            if self._held and self._held + size_bytes > self.half:
                return False
            self._held += size_bytes
            return True

    def hold_ahead(self, size_bytes: int) -> bool:
        """Holds bytes that are to be fetched ahead, if they are free. Returns True if they are held."""
        with self._lock:
            if self._ahead + size_bytes > self.half:
                return False
            self._ahead += size_bytes
            return True

    def free_ahead(self, size_bytes: int) -> None:
        """Frees bytes that were held ahead."""
        with self._lock:
            self._ahead -= size_bytes


BUDGET: Final = FetchBudget()
"""The budget of this process."""
