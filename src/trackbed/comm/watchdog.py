"""Waiting for others, and noticing when one of them will never come."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trackbed.comm.participant import Member
from trackbed.comm.silence import Silence
from trackbed.comm.store import StoreTampered

__all__ = ["LOOKS_PER_TIMEOUT", "Missing", "Vigil"]

LOOKS_PER_TIMEOUT = 10


@dataclass(frozen=True, slots=True)
class Missing:
    """Why a meeting will never end."""

    silent: Sequence[int]
    """Ranks that have not come, and have been silent for too long."""
    waited: Sequence[int]
    """Ranks that have come."""


class Vigil:
    """Watchdog of a meeting: one of those who wait watches all ranks, the others check that somebody watches.

    So a wait costs the store a few requests in each timeout, of which only one grows with the group. That somebody
    watches is a value and not a counter: whoever can only count cannot keep the others from watching.

    Args:
        member: this rank.
        meeting: name of the meeting at which it waits.
        is_watching: True if it is the one who watches. The first to come is.
    """

    def __init__(self, member: Member, meeting: str, *, is_watching: bool) -> None:
        self._member = member
        self._is_watching = is_watching
        self._meeting = meeting
        self._key = f"{meeting}/watch"
        self._looks = 0
        self._misses = 0
        self._touched: set[str] = set()
        self._gap = member.timeout_seconds / LOOKS_PER_TIMEOUT
        self._silence = Silence(self._gap)
        self._last = time.monotonic()

    def look(self) -> Missing | None:
        """Look at the others if it is time to. Returns who is missing for good, if anybody."""
        now = time.monotonic()
        gap = now - self._last
        if gap < (self._gap if self._is_watching else self._member.timeout_seconds / 2):
            return None
        self._last = now
        self._is_watching = self._is_watching or self._takes_over()
        if not self._is_watching:
            return None
        self._looks += 1
        self._touched.add(self._key)
        self._member.store.set(self._key, b"%d" % self._looks)
        return self._judge(gap)

    def touched(self) -> list[str]:
        """Keys to delete when the meeting is over."""
        return sorted(self._touched)

    def _takes_over(self) -> bool:
        looks = self._looks_of_others()
        if looks > self._looks:
            self._looks, self._misses = looks, 0
            return False
        # Whoever watched is gone. All who wait notice it at about the same time, and one of them counts first; where
        # nobody does, because a stranger counts too, all watch from the next time on.
        self._misses += 1
        turn = f"{self._key}/{looks}"
        self._touched.add(turn)
        return self._misses > 1 or self._member.store.add(turn, 1) == 1

    def _looks_of_others(self) -> int:
        store = self._member.store
        if not store.has([self._key]):
            return 0
        text = store.get(self._key)
        if not (text.isdigit() and len(text) < 20):  # as many as 64 bits hold
            msg = f"{self._key!r} must be a number that a rank wrote, but is something else"
            raise StoreTampered(msg)
        return int(text)

    def _judge(self, gap: float) -> Missing | None:
        found = self._member.look()
        self._silence.look({rank: 0 if record is None else record.signs for rank, record in found.items()}, gap)
        waited = [rank for rank, record in found.items() if record is not None and record.meeting == self._meeting]
        absent = sorted(found.keys() - set(waited))
        silent = self._silence.silent_for(self._member.timeout_seconds, absent or waited)
        if absent:
            return Missing(silent, waited) if silent else None
        # All have come, but the last of them did not live to say so.
        return Missing([], waited) if len(silent) == len(waited) else None
