"""Signs of life of a thread, without which it is taken to hang in a call of the system."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trackbed.errors import CheckpointError


class SignsOfLife:
    """Signs of life of a thread while it works by itself, and not while it waits for other ranks.

    Args:
        silent_seconds: time without a sign after which the thread hangs.
    """

    def __init__(self, silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        self._last: float | None = None
        self._what = ""
        self._is_given_up = False

    def give_up(self) -> None:
        """Ends the work at its next sign of life. Its result is not used."""
        self._is_given_up = True

    @contextmanager
    def working(self, what: str, poll: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
        """Expects signs of life in the block. Yields a function that gives one, and calls `poll`.

        Args:
            what: what the thread does, for the error.
            poll: called with each sign.

        Raises:
            CheckpointError: the work was given up.
        """

        def live() -> None:
            if self._is_given_up:
                raise CheckpointError("the save was given up, because its thread hung")
            self._last = time.monotonic()
            poll()

        self._what = what
        live()
        try:
            yield live
        finally:
            self._last = None

    def problem(self) -> str | None:
        """Says that the thread hangs, and where; None if it does not."""
        last = self._last
        if last is None or time.monotonic() - last < self._silent_seconds:
            return None
        return (
            f"its thread has given no sign of life for {self._silent_seconds:g} s while it was to {self._what}: it "
            "hangs in a call of the system"
        )
