"""Entries that another process has published, and that this host may be late to see."""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Final

from trackbed.cache.entry import Entry
from trackbed.cache.look import Look, find, look
from trackbed.cache.opened import Arrays
from trackbed.cache.survey import Expected
from trackbed.errors import CacheError
from trackbed.kernels.poll import current_poll

__all__ = ["await_entry"]

_FIRST_GAP_SECONDS: Final = 0.001
_LONGEST_GAP_SECONDS: Final = 0.05
"""Never so long that a poll waits."""


def await_entry(
    entry: Entry,
    *,
    expected: Expected,
    advice: str,
    timeout_seconds: float = 5.0,
    poll: Callable[[], object] | None = None,
) -> Arrays:
    """The arrays of an entry that another process has published.

    Network file systems remember for a while, usually up to a minute, what a folder held. Here the folders are opened
    anew before each further look, which asks most of them for the truth.

    Args:
        entry: what is wanted.
        expected: what its arrays must look like.
        advice: what to do where it does not appear.
        timeout_seconds: how long to look for it at most, at least 0.
        poll: called between two looks; what it raises ends the wait. The watch of the context is polled, too.

    Raises:
        CacheError: it did not appear in time; the message ends with `advice`.
    """
    started = time.monotonic()
    poll_now = current_poll(None if poll is None else lambda _done: poll())
    found, gap = find(entry, expected, is_vouched=True), _FIRST_GAP_SECONDS
    while found.arrays is None:
        waited = time.monotonic() - started
        if waited >= timeout_seconds:
            raise _unseen(entry, found, waited, advice)
        if poll_now is not None:
            poll_now(0)
        time.sleep(min(gap, timeout_seconds - waited))
        gap = min(gap * 1.5, _LONGEST_GAP_SECONDS)
        _open_anew(f"{entry.directory}", entry.own, entry.aside.directory)
        found = look(entry, expected, is_vouched=True)
    return found.arrays


def _open_anew(*folders: str) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _unseen(entry: Entry, found: Look, waited: float, advice: str) -> CacheError:
    what = f"it damaged: {found.why}" if found.why else "nothing"
    return CacheError(
        f"{entry.shared.array('*')}: the index must appear, looked for it for {waited:.1f} s and found {what}; {advice}"
    )
