"""One rank's side of a step that all ranks execute together."""

import time
from typing import TypeVar

from trackbed.comm.rendezvous import Rendezvous
from trackbed.comm.watchdog import CHECKS_PER_TIMEOUT

__all__ = ["SharedStep", "Stopped", "cause_of"]

E = TypeVar("E", bound=BaseException)


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
        self._next_heartbeat = 0.0

    def check(self) -> None:
        """Raises if another rank has failed. Makes no request.

        Raises:
            Stopped: another rank has failed.
        """
        if self._rendezvous.flag.has_fired():
            raise Stopped

    def poll(self, done: int) -> None:  # noqa: ARG002  kernels call their poll with it
        """Sends a heartbeat if one is due; raises if another rank has failed.

        Its only requests are heartbeats, at most one in each gap.

        Raises:
            Stopped: another rank has failed.
            StoreUnreachable: the store does not answer.
        """
        self.check()
        now = time.monotonic()
        if now >= self._next_heartbeat:
            # Two threads may get here at the same time, and send two heartbeats.
            self._next_heartbeat = now + self._gap
            self._rendezvous.participant.send_heartbeat()
