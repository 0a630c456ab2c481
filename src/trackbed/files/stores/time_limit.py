"""The time that one call to a store may take."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from typing import Final

from trackbed.errors import ArgumentError

_DEFAULT_SECONDS: Final = 60.0
_most: Final[ContextVar[float]] = ContextVar("trackbed_store_seconds", default=inf)


def timeout_seconds() -> float:
    """Returns the seconds that a call may take: `TRACKBED_STORE_TIMEOUT`, or 60, or less inside of `at_most`.

    Raises:
        ArgumentError: the variable is not a number above 0.
    """
    found = os.environ.get("TRACKBED_STORE_TIMEOUT", "")
    try:
        seconds = float(found) if found else _DEFAULT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < inf:
        raise ArgumentError(f"TRACKBED_STORE_TIMEOUT must be a number of seconds above 0, found {found!r}")
    return min(seconds, _most.get())


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Gives calls inside the block no more than some seconds."""
    token = _most.set(min(seconds, _most.get()))
    try:
        yield
    finally:
        _most.reset(token)
