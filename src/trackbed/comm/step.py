"""One rank's side of a step that all ranks execute together."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeVar

from trackbed.comm.crossed_waits import CrossedWaits
from trackbed.comm.rendezvous import Rendezvous
from trackbed.comm.report import describe_ended
from trackbed.comm.watchdog import CHECKS_PER_TIMEOUT
from trackbed.errors import CollectiveError

E = TypeVar("E", bound=BaseException)

_LAST_WORDS_SECONDS: Final = 0.75
"""Time that is left, after a rank was seen to have ended, for what it has sent before."""


class Stopped(Exception):  # noqa: N818  it never leaves the step
    """Another rank has failed, so this rank stops its work. The end of the step reports the failure."""


def cause_of(error: BaseException | None, kind: type[E]) -> E | None:
    """Returns the first exception of type `kind` in the chain of causes and contexts of `error`; None if none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


class SharedStep:
    """Step of a group with a store.

    Args:
        rendezvous: rendezvous at which the step ends.
        max_heartbeat_gap_seconds: see `Group.guarded`.
    """

    def __init__(self, rendezvous: Rendezvous, *, max_heartbeat_gap_seconds: float) -> None:
        self._rendezvous = rendezvous
        self._gap = min(max_heartbeat_gap_seconds, rendezvous.participant.timeout_seconds / CHECKS_PER_TIMEOUT)
        self._next_heartbeat = time.monotonic() + self._gap
        self._noticed: tuple[frozenset[int], float] = (frozenset(), 0.0)
        """Ranks that were seen to have ended, and when."""

    @contextmanager
    def watching_waits(self, counts: Mapping[str, Callable[[], int]]) -> Iterator[None]:
        """Raises, in the block, if ranks wait for each other at different operations. See `Step`."""
        participant = self._rendezvous.participant
        watch = CrossedWaits(participant.store, self._rendezvous.name, participant.rank, participant.job_ranks, counts)
        self._rendezvous.is_watched = True
        try:
            with watch.watching():
                yield
        finally:
            self._rendezvous.keys_to_delete += sorted(watch.keys_to_delete)

    def check(self) -> None:
        """Raises if another rank has failed. Makes no request."""
        if self._rendezvous.flag.has_fired():
            raise Stopped

    def poll(self, done: int) -> None:
        """Sends a heartbeat if one is due; raises if another rank has failed.

        Its only requests are heartbeats, at most one in each gap.
        """
        self.check()
        self._check_peers()
        now = time.monotonic()
        if now >= self._next_heartbeat:
            # Two threads may get here at the same time, and send two heartbeats.
            self._next_heartbeat = now + self._gap
            self._rendezvous.participant.send_heartbeat()

    def _check_peers(self) -> None:
        """Raises if a rank of this host has ended without arriving at the end of the step."""
        ended = frozenset(self._rendezvous.participant.peers.ended())
        if not ended:
            return
        noticed, since = self._noticed
        now = time.monotonic()
        if ended != noticed:
            self._noticed = (ended, now)
        elif now - since >= _LAST_WORDS_SECONDS:
            lost = self._rendezvous.lost_ranks()
            if lost:
                raise CollectiveError(describe_ended(lost))
            self._noticed = (ended, float("inf"))  # all of them have done their part
