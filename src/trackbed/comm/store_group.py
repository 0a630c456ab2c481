"""Groups whose ranks meet over a store."""

import contextlib
import hashlib
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from trackbed.comm.group import Step, check_source
from trackbed.comm.participant import Arrival, Member, Record
from trackbed.comm.rendezvous import Conclude, Meeting, publish
from trackbed.comm.report import (
    Failure,
    Verdict,
    describe_cause,
    describe_difference,
    describe_failures,
    describe_tampering,
)
from trackbed.comm.sealed_store import SealedStore
from trackbed.comm.step import SharedStep, Stopped, cause_of
from trackbed.comm.store import Store, StoreTampered, StoreUnreachable
from trackbed.errors import ArgumentError, CollectiveError

__all__ = ["StoreGroup"]


class StoreGroup:
    """Ranks that reach one store. See `Group`.

    Args:
        connect: called when the store is first needed; gives one that no other group uses, and raises StoreUnreachable.
        rank: number of this process, in `[0, size)`.
        size: how many processes there are, at least 1.
        timeout_seconds: for how long a rank may give no sign of life while others wait for it, above 0.
        store_host: the rank whose process holds the store, which is gone when that ends; None if none of them does.
        secret: the same on all ranks and known to nobody else; None where all who reach the store are trusted. With
            one, the first collective waits for all ranks, also where it is the entry to a step.

    Raises:
        ArgumentError: a number is out of its range.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        rank: int,
        size: int,
        timeout_seconds: float,
        store_host: int | None = None,
        secret: bytes | None = None,
    ) -> None:
        if not 0 <= rank < size:
            msg = f"rank must be in [0, {size}), but is {rank}"
            raise ArgumentError(msg)
        if not timeout_seconds > 0:
            msg = f"timeout_seconds must be above 0, but is {timeout_seconds}"
            raise ArgumentError(msg)
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self._connect = connect
        self._store_host = store_host
        self._secret = secret
        self._entered: Member | None = None
        self._taken: defaultdict[str, list[int]] = defaultdict(list)  # numbers of counters since the last meeting
        self._taking = threading.Lock()
        self._place = [0]  # numbers of the next meeting: [3, 1] is the second inside the fourth
        self._touched: list[str] = []
        self._broken: str | None = None

    def together(self, what: str) -> contextlib.AbstractContextManager[Step]:
        """Collective over the group: what is in the block is one step, which no rank leaves alone. See `Group`."""
        return self._step(what)

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[Step]:
        with self._meet(what, lambda _: Verdict()) as meeting:
            yield SharedStep(meeting)

    def all_gather(self, value: Any) -> list[Any]:
        """Collective over the group: the value of each rank, in rank order. See `Group`."""
        gathered: list[Any] = self._exchange("all_gather", lambda: orjson.dumps(value), _gathered)
        return gathered

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """Collective over the group: the value of rank `source`. See `Group`."""
        check_source(source, self.size)
        offered = value if self.rank == source else None
        return self._exchange("broadcast", lambda: orjson.dumps(offered), partial(_read_from, source))

    def combine(self, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Collective over the group: what `function` makes of the values of all ranks. See `Group`."""
        return self._exchange("combine", lambda: orjson.dumps(value), partial(_combined, function))

    def agree(self, what: str, value: Any) -> None:
        """Collective over the group: return if all ranks have the same value. See `Group`."""
        self._exchange(what, lambda: orjson.dumps(value), partial(_compared, what))

    def barrier(self) -> None:
        """Collective over the group: return when every rank has come. See `Group`."""
        self._exchange("barrier", lambda: b"null", lambda _: Verdict())

    def counter(self, name: str) -> Callable[[], int]:
        """What gives 0, 1, 2 and so on, each number once over all ranks that ask. See `Group`."""
        key = f"{self._next_name()}/counter/{name}"

        def take() -> int:
            number = self._member.store.add(key, 1) - 1
            with self._taking:
                if number < 0 or number in self._taken[key]:
                    msg = f"{key!r} must only ever rise, but gave {number}"
                    raise StoreTampered(msg)
                self._taken[key].append(number)
            if number == 0:
                self._touched.append(key)
            return number

        return take

    def tell(self, value: Any) -> None:
        """Say something of this rank; it goes out with its next sign of life. See `Group`."""
        self._member.tell(orjson.dumps(value))

    def told(self) -> list[Any]:
        """What each rank told last, in rank order. See `Group`."""
        return [None if record is None else record.told for record in self._member.look().values()]

    def leave(self, words: str) -> None:
        """Never meet again; whoever waits for this rank, or will, raises an error with these words. Not collective."""
        if self._broken is None:
            self._broken = f"rank {self.rank} {words}"
            with contextlib.suppress(StoreUnreachable):
                publish(self._member.store, self._next_name(), Verdict(error=self._broken, is_broken=True))

    def _exchange(self, what: str, write: Callable[[], bytes], conclude: Conclude) -> Any:
        verdicts: list[Verdict] = []
        with self._meet(what, conclude, verdicts.append) as meeting:
            meeting.arrival = Arrival(value=write())
        return verdicts[0].value

    @contextlib.contextmanager
    def _meet(
        self,
        what: str,
        conclude: Conclude,
        observe: Callable[[Verdict], object] = lambda _: None,
    ) -> Iterator[Meeting]:
        """A meeting that begins when the block does and ends when all ranks have left theirs."""
        meeting = self._open(what, conclude)
        self._place.append(0)
        cause: BaseException | None = None
        try:
            yield meeting
        except BaseException as error:  # noqa: BLE001  every rank has to know
            cause = error
        verdict = self._close(meeting, cause)
        _raise(what, verdict, cause)
        observe(verdict)

    def _open(self, what: str, conclude: Conclude) -> Meeting:
        if self._broken is not None:
            raise CollectiveError(self._broken)
        try:
            if self._secret is not None and self._entered is None:
                self._prove_presence(what)
            return Meeting.open(self._member, self._next_name(), what, conclude)
        except StoreUnreachable as error:
            self._broken = _describe_unreachable(what, error)
            raise CollectiveError(self._broken) from None

    def _close(self, meeting: Meeting, cause: BaseException | None) -> Verdict:
        inner = self._next_name()
        self._place.pop()
        self._place[-1] += 1
        try:
            if self._broken is None:
                verdict = self._leave_with_all(meeting, cause, inner)
            else:
                # A meeting inside the step was the last. Those who were not there are still to hear of it.
                verdict = meeting.publish(Verdict(error=self._broken, is_broken=True))
        except StoreUnreachable as error:
            verdict = Verdict(error=_describe_unreachable(meeting.what, error), is_broken=True)
            if isinstance(error, StoreTampered):
                # Others may have read a verdict before it was changed, and wait at the next meeting.
                meeting.part_in_distrust(verdict, next_meeting=self._next_name())
        except BaseException as error:
            self._abandon(meeting, error)
            raise
        if verdict.is_broken:
            self._broken = verdict.error
        return verdict

    def _leave_with_all(self, meeting: Meeting, cause: BaseException | None, inner: str) -> Verdict:
        if cause is not None:
            self._tell(meeting, cause, inner)
        with self._taking:
            meeting.arrival = replace(meeting.arrival, is_done=cause is None, taken=dict(self._taken))
            self._taken = defaultdict(list)
        verdict = meeting.come()
        if verdict.error is None and not verdict.is_stop:
            # All have come here, so all have left what was before.
            for key in self._touched:
                meeting.member.store.delete(key)
            self._touched.clear()
        meeting.part(verdict)
        self._touched += meeting.touched
        return verdict

    def _tell(self, meeting: Meeting, cause: BaseException, inner: str) -> None:
        """Stop the others, who may be at work or wait for this rank at a meeting inside the step."""
        unreachable = cause_of(cause, StoreUnreachable)
        if unreachable is not None and not isinstance(unreachable, StoreTampered):
            raise unreachable
        if unreachable is not None:
            meeting.fail(CollectiveError(describe_tampering(meeting.what, unreachable)))
        elif cause_of(cause, Stopped) is None:
            meeting.fail(cause)
        publish(meeting.member.store, inner, Verdict(is_stop=True))
        meeting.touched += [f"{inner}/{last}" for last in ("count", "bell", "verdict")]

    def _abandon(self, meeting: Meeting, error: BaseException) -> None:
        """Leave in the middle of a meeting, or of the next one, if the others have ended this already."""
        told = describe_failures(meeting.what, [Failure(self.rank, describe_cause(error))], total=1)
        is_inner = len(self._place) > 1
        verdict = Verdict(is_stop=True) if is_inner else Verdict(error=told, is_broken=True)
        with contextlib.suppress(StoreUnreachable):
            meeting.publish(verdict)
            publish(meeting.member.store, self._next_name(), verdict)
        if not is_inner:
            self._broken = told

    def _next_name(self) -> str:
        return ".".join(map(str, self._place))

    @property
    def _member(self) -> Member:
        if self._entered is None:
            store = self._connect()
            self._entered = self._member_of(store if self._secret is None else SealedStore(store, self._secret))
        return self._entered

    def _member_of(self, store: Store) -> Member:
        return Member(store, self.rank, self.size, self.timeout_seconds, self._store_host)

    def _prove_presence(self, what: str) -> None:
        """Collective over the group: agree on keys that no start before has used, so that nothing of it is believed.

        Each rank brings a random number, and the keys are named after all of them. Whoever kept what ranks wrote at
        an earlier start, under the same secret, has no such number for a rank of this one.
        """
        number = secrets.token_hex(16)
        shared = self._member.store
        numbers: list[Any] = self._exchange(what, lambda: orjson.dumps(number), _gathered)
        self._touched.clear()  # these few keys stay
        if isinstance(shared, SealedStore):
            name = hashlib.sha256("".join(numbers).encode()).hexdigest()
            self._entered = self._member_of(shared.below(name))
        if numbers[self.rank] != number:
            msg = (
                f"the first verdict must hold what rank {self.rank} brought, but holds what it brought to another start"
            )
            error = StoreTampered(msg)
            with contextlib.suppress(StoreUnreachable):
                verdict = Verdict(error=describe_tampering(what, error), is_broken=True)
                publish(self._member.store, self._next_name(), verdict)
            raise error


def _raise(what: str, verdict: Verdict, cause: BaseException | None) -> None:
    """Raise what a rank has to raise at the end of a meeting that it came to for `cause`, if anything."""
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    if verdict.is_stop:
        # What happened is told at the end of the step around this one.
        raise cause or Stopped
    if verdict.error is not None:
        is_own = cause_of(cause, Stopped) is None and cause_of(cause, StoreUnreachable) is None
        raise CollectiveError(verdict.error) from (cause if is_own else None)
    if cause is not None:
        # The step was given up, so its verdict cannot be that all have done theirs.
        raise CollectiveError(describe_tampering(what, StoreTampered("a verdict must tell of each failure"))) from cause


def _describe_unreachable(what: str, error: StoreUnreachable) -> str:
    if isinstance(error, StoreTampered):
        return describe_tampering(what, error)
    return (
        f"{what}: the store over which the ranks meet must answer, but its host (usually rank 0) "
        f"cannot be reached: {error}"
    )


def _gathered(records: Sequence[Record]) -> Verdict:
    return Verdict(value=[record.value for record in records])


def _combined(function: Callable[[list[Any]], Any], records: Sequence[Record]) -> Verdict:
    return Verdict(value=function([record.value for record in records]))


def _read_from(source: int, records: Sequence[Record]) -> Verdict:
    return Verdict(value=records[source].value)


def _compared(what: str, records: Sequence[Record]) -> Verdict:
    values = [orjson.dumps(record.value, option=orjson.OPT_SORT_KEYS) for record in records]
    return Verdict(error=describe_difference(what, dict(enumerate(values))))
