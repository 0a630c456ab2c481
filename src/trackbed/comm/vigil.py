"""Waiting for others, and noticing when one of them will never come."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trackbed.comm.member import Member, parse_record
from trackbed.comm.silence import Silence

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
    """One of those who wait watches all ranks; the others look now and then whether somebody watches.

    So a wait costs the store a few requests in each timeout, of which only one grows with the group.

    Args:
        member: this rank.
        meeting: name of the meeting at which it waits.
        is_watching: whether it is the one who watches. The first to come is.
    """

    def __init__(self, member: Member, meeting: str, *, is_watching: bool) -> None:
        self._member = member
        self._meeting = meeting
        self._is_watching = is_watching
        self._key = f"{meeting}/watch"
        self._seen = 0
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
        self._seen = self._member.store.add(self._key, 1)
        return self._judge(gap)

    def touched(self) -> list[str]:
        """Keys to delete when the meeting is over."""
        return [self._key] if self._seen else []

    def _takes_over(self) -> bool:
        seen = self._member.store.add(self._key, 0)
        if seen != self._seen:
            self._seen = seen
            return False
        # Whoever watched is gone. All who wait notice it at about the same time, and one of them counts first.
        self._seen = self._member.store.add(self._key, 1)
        return self._seen == seen + 1

    def _judge(self, gap: float) -> Missing | None:
        written = self._member.look()
        self._silence.look(written, gap)
        waited = [rank for rank, raw in written.items() if raw and parse_record(raw).meeting == self._meeting]
        absent = sorted(written.keys() - set(waited))
        silent = self._silence.silent_for(self._member.timeout_seconds, absent or waited)
        if absent:
            return Missing(silent, waited) if silent else None
        # All have come, but the last of them did not live to say so.
        return Missing([], waited) if len(silent) == len(waited) else None
