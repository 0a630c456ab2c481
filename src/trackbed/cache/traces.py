"""Looking at a cache without leaving anything in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["leaves_traces", "without_traces"]

_LEAVES_TRACES: ContextVar[bool] = ContextVar("leaves_traces", default=True)


@contextmanager
def without_traces() -> Iterator[None]:
    """Inside the block, look-ups leave no notes: of uses, of data that were compared, or of what is on the disk."""
    token = _LEAVES_TRACES.set(False)
    try:
        yield
    finally:
        _LEAVES_TRACES.reset(token)


def leaves_traces() -> bool:
    """True unless the calling context is inside `without_traces`."""
    return _LEAVES_TRACES.get()
