"""Calls of one object by one thread at a time, in the process that has made it."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trackbed.errors import CheckpointError


class OneCaller:
    """Refuses calls that come from another thread while one runs, from within it, or from a forked process.

    Args:
        name: name of the object, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._caller: int | None = None
        """The thread that is in a call."""
        self.thread: int | None = None
        """The thread that is in a function of the program, which must not wait for what this thread does."""

    @property
    def is_forked(self) -> bool:
        """True in a process that was forked from the one that has made the object."""
        return os.getpid() != self._process

    def check(self, what: str) -> None:
        """Checks a call that other threads may make, too.

        Raises:
            CheckpointError: it comes from within another call, or from a forked process.
        """
        if self.is_forked:
            raise CheckpointError(
                f"{what}: {self._name} must be used by the process that has made it, but this one was forked from it"
            )
        if threading.get_ident() in (self._caller, self.thread):
            raise CheckpointError(f"{what}: must not be called from `observe`, `keep` or an object that is saved")

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Runs the block as the only call.

        Raises:
            CheckpointError: there is another one, or see `check`.
        """
        self.check(what)
        if not self._lock.acquire(blocking=False):
            raise CheckpointError(
                f"{what}: {self._name} must be called by one thread at a time, but another thread is in a call"
            )
        self._caller = threading.get_ident()
        try:
            yield
        finally:
            self._caller = None
            self._lock.release()
