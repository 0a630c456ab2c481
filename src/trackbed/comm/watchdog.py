"""Watchdog for ranks that stop responding while others wait for them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trackbed.comm.processes import Participant
from trackbed.comm.store import StoreTampered

CHECKS_PER_TIMEOUT = 10
FIRST_CHECK_SECONDS = 10.0
LATE_SECONDS = 20.0
"""Seconds of silence after which a rank that has not arrived is late. The second check is so long after the first."""


class SilenceTimer:
    """Measures for how long each rank has been silent, from repeated observations. Pure: it reads no clock.

    A rank is silent while its number of heartbeats does not rise, so an old record that is put back does not count as a
    heartbeat. Only time between regular observations counts: after the machine was suspended, and all local ranks with
    it, hardly any time seems to have passed.

    Args:
        usual_gap: usual number of seconds between two observations; a longer gap counts as at most twice that.
    """

    def __init__(self, usual_gap: float) -> None:
        self._usual_gap = usual_gap
        self._seconds = 0.0
        self._most_heartbeats: dict[int, int] = {}
        self._since: dict[int, float] = {}

    def observe(self, heartbeats: Mapping[int, int], gap: float) -> None:
        """Records one observation.

        Args:
            heartbeats: number of heartbeats that each rank has sent, 0 for none.
            gap: seconds since the last observation, or since waiting began.
        """
        self._seconds += min(gap, 2 * self._usual_gap)
        for rank, count in heartbeats.items():
            if rank not in self._most_heartbeats or count > self._most_heartbeats[rank]:
                self._since[rank] = self._seconds
                self._most_heartbeats[rank] = count

    def silent_for(self, seconds: float, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks among `ranks` that have been silent for at least `seconds`."""
        return [rank for rank in ranks if self._seconds - self._since[rank] >= seconds]


@dataclass(frozen=True, slots=True)
class Missing:
    """Ranks that keep a rendezvous from ever ending, and those that wait for them."""

    silent: Sequence[int]
    """Ranks that have not arrived, and have been silent for too long."""
    waiting: Sequence[int]
    """Ranks that have arrived."""


class Watchdog:
    """Watchdog of a rendezvous: one waiting rank checks all ranks, and the others check that one does.

    So waiting costs the store a few requests in each timeout, of which only one grows with the group. The number of
    checks is stored as a value, not as a counter: a process that can only increment counters cannot stop the checks.

    Args:
        participant: this rank.
        rendezvous: name of the rendezvous at which it waits.
        is_active: True if this rank is the one that checks all ranks. The first rank to arrive is.

    Attributes:
        late: ranks that have not arrived, and have been silent for a while, but not too long. Known to the active rank.
    """

    def __init__(self, participant: Participant, rendezvous: str, *, is_active: bool) -> None:
        self._participant = participant
        self._is_active = is_active
        self._rendezvous = rendezvous
        self._key = f"{rendezvous}/checks"
        self._checks = 0
        self._misses = 0
        self._keys_to_delete: set[str] = set()
        self._gap = participant.timeout_seconds / CHECKS_PER_TIMEOUT
        self._silence = SilenceTimer(self._gap)
        self._last = time.monotonic()
        # Silence is counted from the first check on, so that one comes early.
        first = min(self._gap / 4, FIRST_CHECK_SECONDS)
        self._next = self._last + (first if is_active else participant.timeout_seconds / 2)
        self.late: Sequence[int] = ()

    def seconds_until_check(self) -> float:
        """Seconds until a check is due."""
        return max(0.0, self._next - time.monotonic())

    def check(self) -> Missing | None:
        """Checks the other ranks if a check is due. Returns the ranks that will never arrive, or None."""
        now = time.monotonic()
        if now < self._next:
            return None
        gap, self._last = now - self._last, now
        self._is_active = self._is_active or self._takes_over()
        # Counted from when the check was due: checks that come late add up to no delay.
        gap_of_active = self._gap if self._checks else min(self._gap, LATE_SECONDS)
        self._next = max(
            now, self._next + (gap_of_active if self._is_active else self._participant.timeout_seconds / 2)
        )
        if not self._is_active:
            return None
        # Written before the records are read, which takes long in a large group: the idle ranks would take this rank
        # for gone meanwhile, and check as well.
        self._checks += 1
        self._keys_to_delete.add(self._key)
        self._participant.store.set(self._key, b"%d" % self._checks)
        return self._find_missing(gap)

    def keys_to_delete(self) -> list[str]:
        """Keys to delete after the rendezvous."""
        return sorted(self._keys_to_delete)

    def _takes_over(self) -> bool:
        checks = self._checks_so_far()
        if checks > self._checks:
            self._checks, self._misses = checks, 0
            return False
        # The active rank is gone. All waiting ranks notice this at about the same time, and the first to increment the
        # counter takes over. If no rank is first, because a stranger increments it too, all take over the next time.
        self._misses += 1
        turn = f"{self._key}/{checks}"
        self._keys_to_delete.add(turn)
        return self._misses > 1 or self._participant.store.add(turn, 1) == 1

    def _checks_so_far(self) -> int:
        store = self._participant.store
        if not store.has([self._key]):
            return 0
        text = store.get(self._key)
        if not (text.isdigit() and len(text) < 20):  # fits 64 bits
            raise StoreTampered(f"{self._key!r} must be a number that a rank wrote, but is something else")
        return int(text)

    def _find_missing(self, gap: float) -> Missing | None:
        found = self._participant.read_present()
        self._silence.observe({rank: 0 if record is None else record.heartbeats for rank, record in found.items()}, gap)
        waiting = [
            rank for rank, record in found.items() if record is not None and record.rendezvous == self._rendezvous
        ]
        absent = sorted(found.keys() - set(waiting))
        # Ranks that have arrived send no heartbeats while they wait: their silence means something only if nobody is
        # absent.
        silent = self._silence.silent_for(self._participant.timeout_seconds, absent or waiting)
        self.late = self._silence.silent_for(LATE_SECONDS, absent)
        if absent:
            return Missing(silent, waiting) if silent else None
        # All ranks have arrived, but the last one died before it published the outcome.
        return Missing([], waiting) if len(silent) == len(waiting) else None
