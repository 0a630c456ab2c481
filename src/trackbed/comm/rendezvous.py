"""A meeting of all ranks: each comes once, and all leave with the same verdict.

Keys of a meeting, under its name:

    count       how many have come, plus 2**32 for each of them that failed
    failures    how many have failed
    failure/I   why the I-th of them did
    bell        there as soon as a rank has failed, or all have come
    verdict     how the meeting ended; whoever puts it there first decides
    readers     how many have read the verdict
    read        there when all have
    watch       how often somebody has looked who is missing
    watch/N     how many want to look after the N-th time

All listen for the bell while they work and wait, which costs no requests. The last to come puts the verdict there.
If a rank fails, the first that does waits a moment for the others to come, so that all who fail at about the same
time are named; should it die meanwhile, the others do without.

Other processes that reach the store may do to its keys whatever they like. So a meeting goes well only if the records
of all ranks say so, which one rank reads before it gives the verdict: numbers and bells, which anybody can move and
ring, only say when to look. The values themselves a `SealedStore` protects.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, Self

from trackbed.comm.participant import Arrival, Member, Record
from trackbed.comm.report import (
    Failure,
    Verdict,
    describe_cause,
    describe_failures,
    describe_silence,
    describe_tampering,
)
from trackbed.comm.store import Bell, Store, StoreTampered, StoreUnreachable
from trackbed.comm.watchdog import LOOKS_PER_TIMEOUT, Vigil

__all__ = ["Conclude", "Meeting", "publish"]

Conclude = Callable[[Sequence[Record]], Verdict]
"""Gives the verdict from the records of all ranks, in rank order; called on the last to come, if none has failed."""

_GRACE_SECONDS: Final = 0.5
_FALLBACK_SECONDS: Final = 1.0
_BELL_SECONDS: Final = 10.0
_FAREWELL_SECONDS: Final = 5.0
_FAREWELL_AFTER_FAILURE_SECONDS: Final = 1.5
_SLICE_SECONDS: Final = 0.5
_MAX_TOLD_FAILURES: Final = 32
_ONE_FAILED: Final = 1 << 32


def publish(store: Store, meeting: str, verdict: Verdict) -> Verdict:
    """End a meeting with a verdict, unless it has ended. Returns the verdict that holds.

    Raises:
        StoreTampered: there is one already that no rank gave.
    """
    try:
        held = store.set_first(f"{meeting}/verdict", verdict.encode())
    finally:
        store.set(f"{meeting}/bell", b"")  # so that all read what is there, whatever it is
    return Verdict.decode(held)


class Meeting:
    """What one rank has to do with a meeting.

    Args:
        member: this rank.
        name: the same on all ranks, and of no other meeting.
        what: what is being done, in words.
        conclude: see `Conclude`.
        bell: that of the meeting.
    """

    def __init__(self, member: Member, name: str, what: str, conclude: Conclude, bell: Bell) -> None:
        self.member = member
        self.name = name
        self.what = what
        self.bell = bell
        self.arrival = Arrival()
        self.touched: list[str] = []  # keys that this rank is to delete when everybody has left
        self._conclude = conclude
        self._failure_order: int | None = None
        """How many had failed when this rank did, itself included; None if it has not."""

    @classmethod
    def open(cls, member: Member, name: str, what: str, conclude: Conclude) -> Self:
        """The meeting of this name; the others may have opened it already."""
        return cls(member, name, what, conclude, member.store.listen(f"{name}/bell"))

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed, before coming."""
        store = self.member.store
        self._failure_order = store.add(self._key("failures"), 1)
        self.touched.append(self._key("failures"))
        if self._failure_order <= _MAX_TOLD_FAILURES:
            key = self._key(f"failure/{self._failure_order}")
            self.touched.append(key)
            store.set(key, Failure(self.member.rank, describe_cause(error)).encode())
        store.set(self._key("bell"), b"")

    def come(self) -> Verdict:
        """Come, wait until the meeting has ended, and return the verdict, which all get.

        Raises:
            StoreTampered: another process has changed the store.
        """
        verdict = self._wait(self._arrive())
        # Nobody may listen any longer for a key that is going to be deleted.
        self.bell.wait(min(_BELL_SECONDS, self.member.timeout_seconds))
        return verdict

    def part(self, verdict: Verdict) -> None:
        """Go: the process that holds the store may end as soon as all have asked it for the last time."""
        # Who was stopped has the end of the step around this one before it.
        if self.member.store_host is not None and not verdict.is_stop:
            self._farewell(_FAREWELL_SECONDS if verdict.error is None else _FAREWELL_AFTER_FAILURE_SECONDS)

    def part_in_distrust(self, verdict: Verdict, *, next_meeting: str) -> None:
        """Tell the others, here and at the next meeting, why this rank comes no more, as far as the store lets it."""
        for name in (self.name, next_meeting):
            with contextlib.suppress(StoreUnreachable):
                publish(self.member.store, name, verdict)
        if self.member.rank == self.member.store_host:
            time.sleep(_FAREWELL_AFTER_FAILURE_SECONDS)

    def _arrive(self) -> int:
        """Returns how many have come, and marks those that failed."""
        self.member.come(self.name, self.arrival)
        return self.member.store.add(self._key("count"), 1 if self._failure_order is None else _ONE_FAILED + 1)

    def _wait(self, count: int) -> Verdict:
        num_failed, num_come = divmod(count, _ONE_FAILED)
        if not 1 <= num_come <= self.member.size:
            msg = f"{self._key('count')!r} must be in [1, {self.member.size}], but is {num_come}"
            raise StoreTampered(msg)
        if num_come == self.member.size:
            self.touched += [self._key(last) for last in ("count", "bell", "verdict")]
            return self.publish(self._sum_up() if num_failed else self._decide())
        if self._failure_order == 1:
            return self._hear(_GRACE_SECONDS)
        return self._watch(Vigil(self.member, self.name, is_watching=num_come == 1))

    def _watch(self, vigil: Vigil) -> Verdict:
        slice_seconds = min(_SLICE_SECONDS, self.member.timeout_seconds / LOOKS_PER_TIMEOUT)
        while not self.bell.wait(slice_seconds):
            missing = vigil.look()
            if missing is not None:
                seconds = self.member.timeout_seconds
                words = describe_silence(self.what, missing=missing.silent, waited=missing.waited, seconds=seconds)
                return self.publish(Verdict(error=words, is_broken=True))
        self.touched += vigil.touched()
        return self._hear(_FALLBACK_SECONDS)

    def _hear(self, patience_seconds: float) -> Verdict:
        """The verdict, if it is there in time; else the one that this rank gives."""
        store = self.member.store
        key = self._key("verdict")
        if store.has([key]) or store.listen(key).wait(patience_seconds):
            return Verdict.decode(store.get(key))
        return self.publish(self._sum_up())

    def publish(self, verdict: Verdict) -> Verdict:
        """End the meeting with a verdict, unless it has ended. Returns the verdict that holds."""
        return publish(self.member.store, self.name, verdict)

    def _decide(self) -> Verdict:
        """The verdict where no rank is said to have failed."""
        try:
            records = self.member.read_all()
            _check_arrivals(self.name, records)
            return self._conclude(records)
        except StoreTampered as error:
            return Verdict(error=describe_tampering(self.what, error), is_broken=True)

    def _sum_up(self) -> Verdict:
        store = self.member.store
        total = store.add(self._key("failures"), 0)
        if not 1 <= total <= self.member.size:
            msg = f"{self._key('verdict')!r} must be there unless a rank has failed, but is gone"
            raise StoreTampered(msg)
        keys = [self._key(f"failure/{order}") for order in range(1, min(total, _MAX_TOLD_FAILURES) + 1)]
        failures = [Failure.decode(store.get(key)) for key in keys if store.has([key])]
        return Verdict(error=describe_failures(self.what, failures, total=total))

    def _farewell(self, patience_seconds: float) -> None:
        """Let all others read the verdict, and tidy up, before the process that holds the store may end."""
        store = self.member.store
        if store.add(self._key("readers"), 1) == self.member.size:
            self.touched += [self._key("readers"), self._key("read")]
            store.set(self._key("read"), b"")
        elif self.member.rank == self.member.store_host:
            deadline = time.monotonic() + patience_seconds
            pause = 0.001
            while not store.has([self._key("read")]) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    def _key(self, last: str) -> str:
        return f"{self.name}/{last}"


def _check_arrivals(name: str, records: Sequence[Record]) -> None:
    """Check that all ranks have come to a meeting with their work done, whatever counters say.

    Raises:
        StoreTampered: a counter, a bell or a record is not as the ranks left it.
    """
    for rank, record in enumerate(records):
        if record.meeting != name:
            msg = f"'{name}/count' must count the ranks that have come, but rank {rank} has not"
            raise StoreTampered(msg)
        if not record.is_done:
            msg = f"'{name}/count' must count the ranks that failed, but rank {rank} was stopped or failed, and none is"
            raise StoreTampered(msg)
    for counter in sorted(set(chain.from_iterable(record.taken for record in records))):
        taken = sorted(chain.from_iterable(record.taken.get(counter, []) for record in records))
        if taken != list(range(len(taken))):
            msg = f"{counter!r} must give each number once and leave none out, but did not"
            raise StoreTampered(msg)
