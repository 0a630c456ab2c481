"""One rank's part in a step that all ranks take together."""

import time
from typing import Final, TypeVar

from trackbed.comm.rendezvous import Meeting
from trackbed.comm.watchdog import LOOKS_PER_TIMEOUT

__all__ = ["SharedStep", "Stopped", "cause_of"]

E = TypeVar("E", bound=BaseException)

_MAX_SIGN_GAP_SECONDS: Final = 1.0


class Stopped(Exception):  # noqa: N818  it never leaves the step
    """Another rank has failed, so this one's work is of no use. The end of the step says what happened."""


def cause_of(error: BaseException | None, kind: type[E]) -> E | None:
    """The exception of this kind that another one comes of, whatever it was made into on its way up; None if none."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


class SharedStep:
    """A step of a group with a store.

    Args:
        meeting: at which it ends.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._gap = min(_MAX_SIGN_GAP_SECONDS, meeting.member.timeout_seconds / LOOKS_PER_TIMEOUT)
        self._next_sign = 0.0

    def poll(self, done: int) -> None:  # noqa: ARG002  what kernels call a poll with
        """Say that this rank is alive; raise if another rank has failed.

        Costs the store nothing but a write now and then: at most one in a second, or in a tenth of the timeout.

        Raises:
            Stopped: another rank has failed.
            StoreUnreachable: nobody can know whether.
        """
        if self._meeting.bell.has_rung():
            raise Stopped
        now = time.monotonic()
        if now >= self._next_sign:
            # Two threads may come here at once: then there are two signs.
            self._next_sign = now + self._gap
            self._meeting.member.give_sign()
