"""The checkpointers of this process that are open, which are closed when the program ends."""

import atexit
import logging
import os
import threading
import weakref
from typing import Final, Protocol

from trackbed.checkpointer.signals import SignalAgreement
from trackbed.errors import CheckpointError

logger = logging.getLogger(__name__)

_END_SECONDS: Final = 5.0


class _Closable(Protocol):
    def close(self) -> None:
        """Waits for the end of what is in flight."""


_open: Final["weakref.WeakSet[_Closable]"] = weakref.WeakSet()
_signals: Final[set[SignalAgreement]] = set()
"""Agreements that were closed, and whose threads may still run at the end of the program."""


def add_open(checkpointer: _Closable) -> None:
    """Has a checkpointer closed when the program ends, unless it is dropped before."""
    _open.add(checkpointer)


def discard_open(checkpointer: _Closable, signals: SignalAgreement | None) -> None:
    """Forgets a checkpointer that was closed. The end of the program waits for its agreement on signals."""
    _open.discard(checkpointer)
    if signals is not None:
        _signals.add(signals)


def _forget_parent() -> None:
    """Forgets the checkpointers of the process that this one was forked from, whose threads it does not have."""
    _open.clear()
    _signals.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _drain() -> None:
    """Waits for the saves in flight at the end of the program."""
    # Threads that the program would wait for, too, may still train and save.
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.current_thread(), threading.main_thread()):
            thread.join()
    for checkpointer in list(_open):
        try:
            checkpointer.close()
        except CheckpointError:
            logger.exception("%s: the last save has failed", checkpointer)
    for signals in list(_signals):
        signals.wait_for_end(_END_SECONDS)


# Threads cannot start others once the interpreter begins to end, which is before the functions of `atexit` are called.
getattr(threading, "_register_atexit", atexit.register)(_drain)
