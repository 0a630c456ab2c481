"""Waiting for entries that another process has committed, and that this host may see late."""

import contextlib
import os
import time
from typing import Final

from trackbed.cache.lookup import Found, State, look_up
from trackbed.cache.request import Request
from trackbed.cancellation import check_cancelled
from trackbed.errors import CacheError

__all__ = ["await_visible"]

_FIRST_GAP_SECONDS: Final = 0.001
_LONGEST_GAP_SECONDS: Final = 0.05
"""Short enough for polls, which are at most that far apart."""


def await_visible(request: Request, *, advice: str, timeout_seconds: float = 5.0) -> Found:
    """Waits for an entry that another process has committed.

    Network file systems cache the content of a folder, usually for up to a minute. Opening the folders again before
    each look makes most of them ask the server.

    Args:
        request: the entry.
        advice: what to do if it does not appear.
        timeout_seconds: longest wait, at least 0.

    Raises:
        CacheError: it did not appear in time; the message ends with `advice`.
    """
    started = time.monotonic()
    gap, entry = _FIRST_GAP_SECONDS, request.entry
    while True:
        (found,) = look_up([request], is_vouched=True)
        if found.state is State.whole:
            return found
        waited = time.monotonic() - started
        if waited >= timeout_seconds:
            what = f"it damaged: {found.why}" if found.why else "nothing"
            where = entry.shared.array("*")
            msg = f"{where}: the index must appear, looked for it for {waited:.1f} s and found {what}; {advice}"
            raise CacheError(msg)
        check_cancelled()
        time.sleep(min(gap, timeout_seconds - waited))
        gap = min(gap * 1.5, _LONGEST_GAP_SECONDS)
        for folder in (f"{entry.directory}", entry.own, entry.aside.directory):
            with contextlib.suppress(OSError):
                os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
