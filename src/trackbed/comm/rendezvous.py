"""Rendezvous of all ranks: each arrives once, and all leave with the same outcome.

Keys of a rendezvous, below its name:

    count         number of ranks that have arrived, plus 2**32 for each of them that failed
    failures      number of ranks that have failed
    failure/I     cause of the I-th failure
    flag          set as soon as a rank has failed, or all have arrived
    outcome       how the rendezvous ended; the first rank to set it decides
    readers       number of ranks that have read the outcome
    read          set once all ranks have read it
    checks        number of checks for missing ranks so far
    checks/N      number of ranks that want to take over the checks after the N-th

All ranks watch the flag while they work and wait, which costs no requests. The last rank to arrive sets the outcome.
If ranks fail, the first of them waits a moment for the others to arrive, so that all ranks that fail at about the same
time are named; if it dies meanwhile, the others end the rendezvous without it.

Other processes that reach the store may change its keys at will. So a rendezvous succeeds only if the records of all
ranks say so, which one rank reads before it sets the outcome: counters and flags, which any process can change, only
tell the ranks when to look. A `SealedStore` protects the values themselves.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Final, Self, TypeVar

from trackbed.cancellation import check_wait
from trackbed.comm.crossed_waits import CHECK_SECONDS, CrossedWaits, Operation, Wait, begin_wait
from trackbed.comm.outcomes import (
    RankFailure,
    RendezvousOutcome,
    describe_cause,
    describe_ended,
    describe_failures,
    describe_late,
    describe_operations,
    describe_silence,
    describe_tampering,
)
from trackbed.comm.processes import Arrival, Participant, RankRecord
from trackbed.comm.store import KeyWatch, Store, StoreTampered, StoreUnreachable
from trackbed.comm.watchdog import CHECKS_PER_TIMEOUT, Watchdog
from trackbed.errors import CollectiveError

logger = logging.getLogger(__name__)

Conclude = Callable[[Sequence[RankRecord]], RendezvousOutcome]
"""Computes the outcome from all ranks' records, in rank order; called on the last rank to arrive if none failed."""

_GRACE_SECONDS: Final = 0.5
_FALLBACK_SECONDS: Final = 1.0
_FLAG_SECONDS: Final = 10.0
_LINGER_SECONDS: Final = 5.0
_LINGER_AFTER_FAILURE_SECONDS: Final = 1.5
_SLICE_SECONDS: Final = 0.5
_FIRST_LOOK_SECONDS: Final = 1.0
"""Time after which a rank that waits at the first rendezvous of a group looks who else is on its host."""
_LONGEST_LOOK_SECONDS: Final = 16.0
_LAST_WORDS_SECONDS: Final = 0.3
"""Time for what a rank has sent before it ended to arrive."""
_OUTCOME_SECONDS: Final = 1.5
"""Time for an outcome to appear after a rank that has arrived was seen to have ended."""
_MAX_REPORTED_FAILURES: Final = 32
_ONE_FAILED: Final = 1 << 32
_LAST: Final = 1 << 62
"""More than the number of any rendezvous inside another one."""


def publish_outcome(store: Store, rendezvous: str, outcome: RendezvousOutcome) -> RendezvousOutcome:
    """Ends a rendezvous with an outcome, unless it has already ended. Returns the outcome that holds."""
    try:
        # The first one decides. Two ranks may end a rendezvous at the same moment: the last to arrive, and one that
        # takes that rank for dead.
        held = store.set_first(f"{rendezvous}/outcome", outcome.encode())
    finally:
        store.set(f"{rendezvous}/flag", b"")  # so that all ranks read the stored outcome, valid or not
    return RendezvousOutcome.decode(held)


class Rendezvous:
    """One rank's view of a rendezvous.

    Args:
        participant: this rank.
        name: the same on all ranks, and of no other rendezvous.
        what: description of the work.
        conclude: see `Conclude`.
        flag: watch of the rendezvous's flag.
    """

    def __init__(self, participant: Participant, name: str, what: str, conclude: Conclude, flag: KeyWatch) -> None:
        self.participant = participant
        self.name = name
        self.what = what
        self.flag = flag
        self.operation = what
        """Operation that it belongs to, as users know it."""
        self.is_watched = False
        """True if it ends a step whose waits are watched: then what is inside of it are operations."""
        self.arrival = Arrival()
        self.keys_to_delete: list[str] = []  # by this rank, once all ranks have left
        self._conclude = conclude
        self._ended_since = math.inf
        """Time since which all ranks of this host that have ended had arrived before."""
        self._failure_order: int | None = None
        """Number of failed ranks when this rank failed, including itself; None if it has not."""

    @classmethod
    def open(cls, participant: Participant, name: str, what: str, conclude: Conclude) -> Self:
        """Opens the rendezvous of this name, which other ranks may have opened already."""
        return cls(participant, name, what, conclude, participant.store.watch(f"{name}/flag"))

    def fail(self, error: BaseException) -> None:
        """Reports to the other ranks that this one has failed. Called before it arrives."""
        store = self.participant.store
        self._failure_order = store.add(self._key("failures"), 1)
        self.keys_to_delete.append(self._key("failures"))
        if self._failure_order <= _MAX_REPORTED_FAILURES:
            key = self._key(f"failure/{self._failure_order}")
            self.keys_to_delete.append(key)
            cause = describe_cause(error)
            ended = self.participant.peers.ended()
            if ended and describe_ended(ended) not in cause:  # a library names a lost connection only
                cause = f"{cause}; {describe_ended(ended)}"
            # Before the flag: whoever sees the flag may sum up the failures at once, and would find one without a
            # cause.
            store.set(key, RankFailure(self.participant.rank, cause).encode())
        store.set(self._key("flag"), b"")

    def arrive_and_wait(self) -> RendezvousOutcome:
        """Arrives, waits until the rendezvous has ended, and returns its outcome, which is the same on all ranks."""
        operation = Operation(
            self.participant.domain, _position_of(self.name), self.operation, self.participant.job_ranks
        )
        wait = begin_wait(operation)
        if wait.is_watched:
            self.arrival = replace(self.arrival, operation=self.operation)
        outcome = self._wait(self._arrive(), wait)
        # A watch must fire before its key is deleted.
        self.flag.wait(min(_FLAG_SECONDS, self.participant.timeout_seconds))
        return outcome

    def leave(self, outcome: RendezvousOutcome) -> None:
        """Leaves: the process that hosts the store may end once all ranks have made their last request."""
        # A rank that was stopped has yet to reach the end of the enclosing step.
        if self.participant.store_host is not None and not outcome.is_stop:
            self._linger(
                _LINGER_SECONDS if outcome.error is None else _LINGER_AFTER_FAILURE_SECONDS,
                num_readers=outcome.num_readers or self.participant.size,
            )

    def leave_after_tampering(self, outcome: RendezvousOutcome, *, next_rendezvous: str) -> None:
        """Publishes, here and at the next rendezvous, why this rank arrives no more, as far as the store allows."""
        for name in (self.name, next_rendezvous):
            with contextlib.suppress(StoreUnreachable):
                publish_outcome(self.participant.store, name, outcome)
        if self.participant.rank == self.participant.store_host:
            time.sleep(_LINGER_AFTER_FAILURE_SECONDS)

    def _arrive(self) -> int:
        """Counts this rank as arrived, and as failed if it has. Returns the sum of the counter `count`."""
        # The record before the count: the rank that completes the count reads all records at once.
        self.participant.arrive(self.name, self.arrival)
        return self.participant.store.add(self._key("count"), 1 if self._failure_order is None else _ONE_FAILED + 1)

    def _wait(self, count: int, wait: Wait) -> RendezvousOutcome:
        num_failed, num_arrived = divmod(count, _ONE_FAILED)
        if not 1 <= num_arrived <= self.participant.size:
            raise StoreTampered(f"{self._key('count')!r} must be in [1, {self.participant.size}], but is {num_arrived}")
        if num_arrived == self.participant.size:
            self.keys_to_delete += [self._key(last) for last in ("count", "flag", "outcome")]
            return self.publish_outcome(self._sum_up_failures() if num_failed else self._conclude_records())
        # The first to fail leaves the others a moment to fail, too, so that all are named. They wait for its outcome.
        if self._failure_order == 1:
            return self._read_outcome(_GRACE_SECONDS)
        return self._wait_for_flag(Watchdog(self.participant, self.name, is_active=num_arrived == 1), wait)

    def _wait_for_flag(self, watchdog: Watchdog, wait: Wait) -> RendezvousOutcome:
        is_warned = False
        look_seconds = _FIRST_LOOK_SECONDS
        look_at = time.monotonic() + look_seconds
        slice_seconds = CHECK_SECONDS if wait.is_watched else _SLICE_SECONDS
        while not self.flag.wait(min(slice_seconds, watchdog.seconds_until_check())):
            check_wait()
            wait.check()
            if not self.participant.peers.has_met and time.monotonic() >= look_at:
                # The first rendezvous of the group: a rank may end before it gets here.
                look_seconds = min(2 * look_seconds, _LONGEST_LOOK_SECONDS)
                look_at = time.monotonic() + look_seconds
                self.participant.peers.meet(self.participant.store, is_complete=False)
            lost = self.lost_ranks()
            # The rank that has ended may have been the last to arrive, and have set the outcome just before.
            if lost and not self.flag.wait(_LAST_WORDS_SECONDS):
                words = f"{self.operation}: {describe_ended(lost)}"
                num_readers = self.participant.size - len(self.participant.peers.ended())
                return self.publish_outcome(RendezvousOutcome(error=words, is_broken=True, num_readers=num_readers))
            outcome = self._outcome_without_the_ended(is_lost=bool(lost))
            if outcome is not None:
                return self.publish_outcome(outcome)
            missing = watchdog.check()
            if missing is not None:
                seconds = self.participant.timeout_seconds
                words = describe_silence(self.what, missing=missing.silent, waiting=missing.waiting, seconds=seconds)
                return self.publish_outcome(
                    RendezvousOutcome(error=words, is_broken=True, num_readers=len(missing.waiting))
                )
            if watchdog.late and not is_warned:
                is_warned = True
                logger.warning("%s", describe_late(self.what, late=watchdog.late, rank=self.participant.rank))
        self.keys_to_delete += watchdog.keys_to_delete()
        return self._read_outcome(_FALLBACK_SECONDS)

    def _outcome_without_the_ended(self, *, is_lost: bool) -> RendezvousOutcome | None:
        """Returns the outcome where a rank has arrived, and has ended before there was one; else None.

        It may have ended before it was counted, or as the last one, before it published the outcome. No other rank
        would publish one.
        """
        ended = {} if is_lost else self.participant.peers.ended()
        if not ended:
            self._ended_since = math.inf
            return None
        now = time.monotonic()
        self._ended_since = min(self._ended_since, now)
        if now - self._ended_since < _OUTCOME_SECONDS:
            return None
        num_failed, num_arrived = divmod(self.participant.store.add(self._key("count"), 0), _ONE_FAILED)
        if num_arrived == self.participant.size:
            return self._sum_up_failures() if num_failed else self._conclude_records()
        num_readers = self.participant.size - len(ended)
        return RendezvousOutcome(
            error=f"{self.operation}: {describe_ended(ended)}", is_broken=True, num_readers=num_readers
        )

    def lost_ranks(self) -> dict[int, int]:
        """Process of each rank of this host that has ended before it arrived here, by rank."""
        ended = self.participant.peers.ended()
        if not ended:
            return {}
        records = self.participant.read_present()
        arrived = {rank for rank, record in records.items() if record is not None and record.rendezvous == self.name}
        return {rank: process for rank, process in ended.items() if rank not in arrived}

    def _read_outcome(self, wait_seconds: float) -> RendezvousOutcome:
        """Reads the outcome; if there is none after `wait_seconds`, publishes one that sums up the failures."""
        store = self.participant.store
        key = self._key("outcome")
        if store.has([key]) or store.watch(key).wait(wait_seconds):
            return RendezvousOutcome.decode(store.get(key))
        return self.publish_outcome(self._sum_up_failures())

    def publish_outcome(self, outcome: RendezvousOutcome) -> RendezvousOutcome:
        """Ends the rendezvous with an outcome, unless it has already ended. Returns the outcome that holds."""
        return publish_outcome(self.participant.store, self.name, outcome)

    def _conclude_records(self) -> RendezvousOutcome:
        """Computes the outcome where no rank has reported a failure."""
        try:
            records = self.participant.read_all()
            _check_arrivals(self.name, records)
            difference = describe_operations({rank: record.operation for rank, record in enumerate(records)})
            return self._conclude(records) if difference is None else RendezvousOutcome(error=difference)
        except StoreTampered as error:
            return RendezvousOutcome(error=describe_tampering(self.what, error), is_broken=True)

    def _sum_up_failures(self) -> RendezvousOutcome:
        store = self.participant.store
        total = store.add(self._key("failures"), 0)
        if not 1 <= total <= self.participant.size:
            raise StoreTampered(f"{self._key('outcome')!r} must be there unless a rank has failed, but is gone")
        keys = [self._key(f"failure/{order}") for order in range(1, min(total, _MAX_REPORTED_FAILURES) + 1)]
        failures = [RankFailure.decode(store.get(key)) for key in keys if store.has([key])]
        return RendezvousOutcome(error=describe_failures(self.what, failures, total=total))

    def _linger(self, wait_seconds: float, *, num_readers: int) -> None:
        """Waits, in the process that hosts the store, until all other ranks have read the outcome and tidied up."""
        store = self.participant.store
        # The store ends with the process of its host. If that went on to its end at once, ranks that have yet to read
        # the outcome would report a lost store in the place of a success.
        if store.add(self._key("readers"), 1) == num_readers:
            self.keys_to_delete += [self._key("readers"), self._key("read")]
            store.set(self._key("read"), b"")
        elif self.participant.rank == self.participant.store_host:
            deadline = time.monotonic() + wait_seconds
            pause = 0.001
            while not store.has([self._key("read")]) and time.monotonic() < deadline:
                # A rank that has ended after it arrived may have read the outcome, and counts as a reader then.
                num_lost = len(self.lost_ranks())
                if num_lost and store.add(self._key("readers"), 0) >= min(
                    num_readers, self.participant.size - num_lost
                ):
                    return  # no other rank will read it
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    def _key(self, last: str) -> str:
        return f"{self.name}/{last}"


def _position_of(name: str) -> tuple[int, ...]:
    """Place of a rendezvous in the order in which ranks arrive: after every rendezvous inside of it."""
    return (*map(int, name.split(".")), _LAST)


def _check_arrivals(name: str, records: Sequence[RankRecord]) -> None:
    """Checks the counters of a rendezvous against the records: all ranks must have arrived with their work done."""
    for rank, record in enumerate(records):
        if record.rendezvous != name:
            raise StoreTampered(f"'{name}/count' must count the ranks that have arrived, but rank {rank} has not")
        if not record.is_done:
            raise StoreTampered(
                f"'{name}/count' must count the ranks that failed, but rank {rank} was stopped or failed, and none is"
            )
    for counter in sorted(set(chain.from_iterable(record.taken for record in records))):
        taken = sorted(chain.from_iterable(record.taken.get(counter, []) for record in records))
        if taken != list(range(len(taken))):
            raise StoreTampered(f"{counter!r} must give each number once and leave none out, but did not")


E = TypeVar("E", bound=BaseException)

_STEP_LAST_WORDS_SECONDS: Final = 0.75
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
        # Two looks, some time apart: the rank may have arrived, or reported its failure, just before it ended, and what
        # it has sent is still on its way.
        noticed, since = self._noticed
        now = time.monotonic()
        if ended != noticed:
            self._noticed = (ended, now)
        elif now - since >= _STEP_LAST_WORDS_SECONDS:
            lost = self._rendezvous.lost_ranks()
            if lost:
                raise CollectiveError(describe_ended(lost))
            self._noticed = (ended, float("inf"))  # all of them have done their part
