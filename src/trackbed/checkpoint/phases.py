"""Times of the phases of a save or load."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Observer = Callable[[str, float], None]
"""Called with the name of a phase, and its seconds."""


class Phases:
    """Times phases.

    Args:
        observe: called after each phase; None for no one.
    """

    def __init__(self, observe: Observer | None) -> None:
        self._observe = observe

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block, unless it fails."""
        start = time.perf_counter()
        yield
        if self._observe is not None:
            self._observe(name, time.perf_counter() - start)
