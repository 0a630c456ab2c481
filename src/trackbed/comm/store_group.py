"""Groups whose ranks communicate over a key-value store."""

import contextlib
import hashlib
import os
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from trackbed.comm.difference import describe_difference
from trackbed.comm.group import Step, check_child_name, check_source
from trackbed.comm.outcomes import (
    RankFailure,
    RendezvousOutcome,
    describe_cause,
    describe_ended,
    describe_failures,
    describe_tampering,
)
from trackbed.comm.processes import Arrival, Participant, Peers, RankRecord
from trackbed.comm.rendezvous import Conclude, Rendezvous, SharedStep, Stopped, cause_of, publish_outcome
from trackbed.comm.store import Connection, HostAware, SealedStore, Store, StoreClosed, StoreTampered, StoreUnreachable
from trackbed.errors import ArgumentError, CollectiveError


class StoreGroup:
    """Group of the ranks that share a store. See `Group`.

    Args:
        connect: opens a store that no other group uses; called when this group or a child first needs it. May raise
            StoreUnreachable.
        rank: number of this process, in `[0, size)`.
        size: number of processes, at least 1.
        timeout_seconds: seconds for which a rank may send no heartbeat while others wait for it, above 0.
        store_host: rank whose process hosts the store, which ends with that process; None if none of the ranks does.
        secret: the same on all ranks and known to no other process; None to trust every process that reaches the store.
            With a secret, the first collective waits for all ranks, even if it is the entry to a step.
        job_ranks: number of each rank in the job; None if they are the same.
        known_processes: processes of ranks of the job on this host, which its groups share; None for those of this
            group and its children.
        path: empty, or the names of a child and the groups above it, as part of what the secret authenticates.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        *,
        rank: int,
        size: int,
        timeout_seconds: float,
        store_host: int | None = None,
        secret: bytes | None = None,
        job_ranks: Sequence[int] | None = None,
        known_processes: dict[int, tuple[int, int]] | None = None,
        path: str = "",
    ) -> None:
        if not 0 <= rank < size:
            raise ArgumentError(f"rank must be in [0, {size}), but is {rank}")
        if not timeout_seconds > 0:
            raise ArgumentError(f"timeout_seconds must be above 0, but is {timeout_seconds}")
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self._connect = connect
        self._store_host = store_host
        self._secret = secret
        self._path = path
        self._connection: Connection | None = None
        self._connection_lock = threading.Lock()
        self._children: dict[str, StoreGroup] = {}
        self._joined: Participant | None = None
        self._taken: defaultdict[str, list[int]] = defaultdict(list)  # numbers of counters since the last rendezvous
        self._taken_lock = threading.Lock()
        self._next_numbers = [0]  # numbers of the next rendezvous: [3, 1] is the second inside the fourth
        self._num_users = 0
        self._open_rendezvous: list[Rendezvous] = []
        self._keys_to_delete: list[str] = []
        self._peers = Peers(rank, job_ranks or (), {} if known_processes is None else known_processes)
        self._has_announced = False
        self._broken: str | None = None
        """Text of the error that broke the group."""

    def guarded(self, what: str, *, max_heartbeat_gap_seconds: float = 1.0) -> contextlib.AbstractContextManager[Step]:
        """Collective over the group: runs the block as one step on all ranks. See `Group`."""
        return self._step(what, max_heartbeat_gap_seconds)

    @contextlib.contextmanager
    def _step(self, what: str, max_heartbeat_gap_seconds: float) -> Iterator[Step]:
        with self._rendezvous(what, lambda _: RendezvousOutcome()) as rendezvous:
            yield SharedStep(rendezvous, max_heartbeat_gap_seconds=max_heartbeat_gap_seconds)

    def all_gather(self, value: Any) -> list[Any]:
        """Collective over the group: returns the value of each rank, in rank order. See `Group`."""
        gathered: list[Any] = self._exchange("all_gather", lambda: orjson.dumps(value), _gathered)
        return gathered

    def broadcast(self, value: Any, *, source: int = 0) -> Any:
        """Collective over the group: returns the value of rank `source`. See `Group`."""
        check_source(source, self.size)
        offered = value if self.rank == source else None
        return self._exchange("broadcast", lambda: orjson.dumps(offered), partial(_read_from, source))

    def combine(self, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Collective over the group: returns `function` of the values of all ranks. See `Group`."""
        return self._exchange("combine", lambda: orjson.dumps(value), partial(_combined, function))

    def agree(self, what: str, value: Any) -> None:
        """Collective over the group: checks that all ranks have the same value. See `Group`."""
        self._exchange(what, lambda: orjson.dumps(value), partial(_compared, what))

    def barrier(self) -> None:
        """Collective over the group: returns once every rank has arrived. See `Group`."""
        self._exchange("barrier", lambda: b"null", lambda _: RendezvousOutcome())

    def counter(self, name: str) -> Callable[[], int]:
        """Creates a counter shared by all ranks, which starts at 0. See `Group`."""
        key = f"{self._next_name()}/counter/{name}"

        def take() -> int:
            number = self._participant.store.add(key, 1) - 1
            # Any thread may take numbers. All ranks' numbers are compared at the next rendezvous, so none may be lost.
            with self._taken_lock:
                if number < 0 or number in self._taken[key]:
                    raise StoreTampered(f"{key!r} must only ever rise, but gave {number}")
                self._taken[key].append(number)
            # One rank deletes the counter: the only one that has got its first number.
            if number == 0:
                self._keys_to_delete.append(key)
            return number

        return take

    def publish_status(self, value: Any) -> None:
        """Publishes a status of this rank with its next heartbeat. See `Group`."""
        self._participant.set_status(orjson.dumps(value))

    def statuses(self) -> list[Any]:
        """Last known status of each rank, in rank order. See `Group`."""
        return [None if record is None else record.status for record in self._participant.read_present().values()]

    def ended_ranks(self) -> str | None:
        """Text about the ranks of this host whose processes have ended; None if there are none. Not collective."""
        ended = self._peers.ended()
        return describe_ended(ended) if ended else None

    def child(self, name: str) -> "StoreGroup":
        """Creates a group of the same ranks with steps of its own. See `Group`.

        The child and its connection live as long as this group.
        """
        check_child_name(name)
        child = StoreGroup(
            partial(self._connect_below, f"child/{name}"),
            rank=self.rank,
            size=self.size,
            timeout_seconds=self.timeout_seconds,
            store_host=self._store_host,
            secret=self._secret,
            job_ranks=self._peers.job_ranks,
            known_processes=self._peers.known,
            path=f"{self._path}child/{name}/",
        )
        # One operation: of two threads that ask for the same name, one must get the error, as their keys would mix.
        if self._children.setdefault(name, child) is not child:
            raise ArgumentError(
                f"name must be one that no other child of this group has, but is {name!r}, which one has"
            )
        return child

    def leave(self, reason: str) -> None:
        """Leaves the group and its children for good. Ranks that wait for this one, now or later, raise an error.

        Not collective. Steps of children must have ended, or end soon: those that follow raise an error.

        Args:
            reason: end of the error, after the number of the rank.
        """
        # Children too: failures of this group do not reach ranks that wait in a child.
        for child in list(self._children.values()):
            child.leave(reason)
        if self._broken is None:
            self._broken = f"rank {self.rank} {reason}"
            with contextlib.suppress(StoreUnreachable):
                publish_outcome(
                    self._participant.store, self._next_name(), RendezvousOutcome(error=self._broken, is_broken=True)
                )

    def _exchange(self, what: str, write: Callable[[], bytes], conclude: Conclude) -> Any:
        outcomes: list[RendezvousOutcome] = []
        with self._rendezvous(what, conclude, outcomes.append) as rendezvous:
            rendezvous.arrival = Arrival(value=write())
        return outcomes[0].value

    @contextlib.contextmanager
    def _rendezvous(
        self,
        what: str,
        conclude: Conclude,
        observe: Callable[[RendezvousOutcome], object] = lambda _: None,
    ) -> Iterator[Rendezvous]:
        """Holds a rendezvous that opens before the block and ends when all ranks have left theirs."""
        rendezvous = self._open(what, conclude)
        # Users know the outermost operation, below the training loop that it is in.
        rendezvous.operation = next((outer.what for outer in self._open_rendezvous if not outer.is_watched), what)
        self._open_rendezvous.append(rendezvous)
        # Rendezvous inside the block are numbered below this one. So a rank that fails knows where the others may be,
        # and can end that rendezvous, too.
        self._next_numbers.append(0)
        process = os.getpid()
        cause: BaseException | None = None
        try:
            yield rendezvous
        except BaseException as error:  # noqa: BLE001  reported to every rank
            cause = error
        if os.getpid() != process:
            # A forked child has left the block. It must not speak for its parent, whose connection it shares.
            if cause is not None:
                raise cause
            return
        outcome = self._close(rendezvous, cause)
        _raise(what, outcome, cause)
        observe(outcome)

    def _open(self, what: str, conclude: Conclude) -> Rendezvous:
        if self._broken is not None:
            raise CollectiveError(self._broken)
        try:
            if self._secret is not None and self._joined is None:
                self._exchange_nonces(what)
            # Before this rank arrives anywhere: whoever leaves the first rendezvous finds all processes of its host.
            if not self._has_announced:
                self._has_announced = True
                self._peers.announce(self._participant.store)
            return Rendezvous.open(self._participant, self._next_name(), what, conclude)
        except StoreUnreachable as error:
            self._broken = self._describe_unreachable(what, error)
            raise CollectiveError(self._broken) from None

    def _close(self, rendezvous: Rendezvous, cause: BaseException | None) -> RendezvousOutcome:
        # The rendezvous inside this one to which this rank does not come, and where the others may wait.
        inner = self._next_name()
        self._open_rendezvous.pop()
        self._next_numbers.pop()
        # Counted now, whatever becomes of this rendezvous: the others go on to the next number, too, and that is where
        # `_abandon` and `leave_after_tampering` meet them.
        self._next_numbers[-1] += 1
        try:
            if self._broken is None:
                outcome = self._arrive_and_leave(rendezvous, cause, inner)
            else:
                # A rendezvous inside the step broke the group. Ranks that were not there still have to be notified.
                outcome = self._publish_again(rendezvous, RendezvousOutcome(error=self._broken, is_broken=True))
        except StoreUnreachable as error:
            outcome = RendezvousOutcome(error=self._describe_unreachable(rendezvous.what, error), is_broken=True)
            if isinstance(error, StoreTampered):
                # Other ranks may have read an outcome before it was changed, and wait at the next rendezvous.
                rendezvous.leave_after_tampering(outcome, next_rendezvous=self._next_name())
        except BaseException as error:
            # An interrupt, for example, while this rank waits: the others would wait for it until the timeout.
            self._abandon(rendezvous, error)
            raise
        if outcome.is_broken:
            self._broken = outcome.error
        return outcome

    def _publish_again(self, rendezvous: Rendezvous, outcome: RendezvousOutcome) -> RendezvousOutcome:
        """Ends a rendezvous with an outcome that ranks know, whose store may be gone with the first of them to end."""
        try:
            return rendezvous.publish_outcome(outcome)
        except StoreTampered:
            raise
        except StoreUnreachable:
            return outcome

    def _arrive_and_leave(self, rendezvous: Rendezvous, cause: BaseException | None, inner: str) -> RendezvousOutcome:
        if cause is not None:
            self._stop_others(rendezvous, cause, inner)
        with self._taken_lock:
            # Read and emptied in one piece: a number that another thread takes in between belongs to the next
            # rendezvous.
            rendezvous.arrival = replace(rendezvous.arrival, is_done=cause is None, taken=dict(self._taken))
            self._taken = defaultdict(list)
        outcome = rendezvous.arrive_and_wait()
        if outcome.error is None and not outcome.is_stop:
            # All ranks have arrived here, so all have left every earlier rendezvous.
            for key in self._keys_to_delete:
                rendezvous.participant.store.delete(key)
            self._keys_to_delete.clear()
            if not self._peers.has_met:
                # All ranks have been here, and said which process they are. Nobody has left for good yet.
                self._peers.meet(rendezvous.participant.store)
        rendezvous.leave(outcome)
        # Deleted after the next rendezvous: until all have come there, a slow rank may still read the outcome of this
        # one.
        self._keys_to_delete += rendezvous.keys_to_delete
        return outcome

    def _stop_others(self, rendezvous: Rendezvous, cause: BaseException, inner: str) -> None:
        """Stops the other ranks, which may be at work or wait for this one at a rendezvous inside the step."""
        unreachable = cause_of(cause, StoreUnreachable)
        if unreachable is not None and not isinstance(unreachable, StoreTampered):
            # Without a store nobody can be told; the others notice by themselves.
            raise unreachable
        if unreachable is not None:
            rendezvous.fail(CollectiveError(describe_tampering(rendezvous.what, unreachable)))
        elif cause_of(cause, Stopped) is None:
            rendezvous.fail(cause)
        publish_outcome(rendezvous.participant.store, inner, RendezvousOutcome(is_stop=True))
        rendezvous.keys_to_delete += [f"{inner}/{last}" for last in ("count", "flag", "outcome")]

    def _abandon(self, rendezvous: Rendezvous, error: BaseException) -> None:
        """Ends the rendezvous for all ranks, or the next one if the others have already ended this one."""
        cause = describe_cause(error)
        if cause_of(error, Stopped) is not None:
            cause = (
                "it gave up, because a training loop around it has failed, whose error says why: these ranks can hold "
                "no further step together, so start the program again"
            )
        failure = describe_failures(rendezvous.what, [RankFailure(self.rank, cause)], total=1)
        is_inner = len(self._next_numbers) > 1
        outcome = RendezvousOutcome(is_stop=True) if is_inner else RendezvousOutcome(error=failure, is_broken=True)
        with contextlib.suppress(StoreUnreachable):
            rendezvous.publish_outcome(outcome)
            publish_outcome(rendezvous.participant.store, self._next_name(), outcome)
        if not is_inner:
            self._broken = failure

    def _describe_unreachable(self, what: str, error: StoreUnreachable) -> str:
        ended = self._peers.ended(wait_for=self._store_host if isinstance(error, StoreClosed) else None)
        if self._store_host in ended:
            return f"{what}: {describe_ended(ended)}"
        return _describe_unreachable(what, error)

    def _next_name(self) -> str:
        return ".".join(map(str, self._next_numbers))

    @property
    def _participant(self) -> Participant:
        if self._joined is None:
            self._joined = self._participant_of(self._store_below())
        return self._joined

    def _store_below(self, prefix: str = "") -> Store:
        """Returns the store of this group's keys below `prefix`, over its one connection."""
        connection = self._connected()
        if self._secret is None:
            return connection
        return SealedStore(connection, self._secret, path=self._path, prefix=prefix)

    def _connected(self) -> Connection:
        with self._connection_lock:  # a child may need it first, on another thread
            if self._connection is None:
                self._connection = self._connect()
                if isinstance(self._connection, HostAware):
                    self._connection.has_host_ended = self._has_host_ended
            return self._connection

    def _has_host_ended(self) -> bool:
        """True if the process that hosts the store has ended."""
        return self._store_host in self._peers.ended()

    def _connect_below(self, name: str) -> Connection:
        return self._connected().below(name)

    def _participant_of(self, store: Store) -> Participant:
        return Participant(
            store, self.rank, self.size, self.timeout_seconds, self._store_host, self._peers, domain=self.domain
        )

    @property
    def domain(self) -> str:
        """Name of the group, the same on its ranks, and which no other group of any of them has."""
        return f"{getattr(self._connected(), 'name', '')}/{self._path}"

    def count_user(self) -> int:
        """Number of earlier calls: names, by the order of creation, what uses the group apart from its collectives."""
        self._num_users += 1
        return self._num_users - 1

    @property
    def job_ranks(self) -> Sequence[int]:
        """Number of each rank in the job."""
        return self._peers.job_ranks or range(self.size)

    def _exchange_nonces(self, what: str) -> None:
        """Collective over the group: agrees on keys that no earlier start has used, to prevent replays.

        Each rank brings a nonce, and the keys are named after all nonces. A process that kept the values of an earlier
        start with the same secret has none that contains the nonce of a rank of this start.
        """
        nonce = secrets.token_hex(16)
        self._joined = self._participant_of(self._store_below())
        nonces: list[Any] = self._exchange(what, lambda: orjson.dumps(nonce), _gathered)
        self._keys_to_delete.clear()  # these few keys stay
        name = hashlib.sha256("".join(nonces).encode()).hexdigest()
        self._joined = self._participant_of(self._store_below(f"{name}/"))
        if nonces[self.rank] != nonce:
            msg = f"the first outcome must hold the nonce of rank {self.rank}, but holds that of another start"
            error = StoreTampered(msg)
            with contextlib.suppress(StoreUnreachable):
                outcome = RendezvousOutcome(error=describe_tampering(what, error), is_broken=True)
                publish_outcome(self._participant.store, self._next_name(), outcome)
            raise error


def _raise(what: str, outcome: RendezvousOutcome, cause: BaseException | None) -> None:
    """Raises the error of this rank at the end of a rendezvous, if any; `cause` is the exception of its block."""
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    if outcome.is_stop:
        # The end of the enclosing step reports the failure.
        raise cause or Stopped
    if outcome.error is not None:
        is_own = cause_of(cause, Stopped) is None and cause_of(cause, StoreUnreachable) is None
        raise CollectiveError(outcome.error) from (cause if is_own else None)
    if cause is not None:
        # This rank gave the step up, so the outcome cannot be that all ranks have done their work.
        raise CollectiveError(describe_tampering(what, StoreTampered("an outcome must report each failure"))) from cause


def _describe_unreachable(what: str, error: StoreUnreachable) -> str:
    if isinstance(error, StoreTampered):
        return describe_tampering(what, error)
    return f"{what}: the rendezvous store must answer, but its host (usually rank 0) cannot be reached: {error}"


def _gathered(records: Sequence[RankRecord]) -> RendezvousOutcome:
    return RendezvousOutcome(value=[record.value for record in records])


def _combined(function: Callable[[list[Any]], Any], records: Sequence[RankRecord]) -> RendezvousOutcome:
    return RendezvousOutcome(value=function([record.value for record in records]))


def _read_from(source: int, records: Sequence[RankRecord]) -> RendezvousOutcome:
    return RendezvousOutcome(value=records[source].value)


def _compared(what: str, records: Sequence[RankRecord]) -> RendezvousOutcome:
    values = [orjson.dumps(record.value, option=orjson.OPT_SORT_KEYS) for record in records]
    return RendezvousOutcome(error=describe_difference(what, dict(enumerate(values))))
