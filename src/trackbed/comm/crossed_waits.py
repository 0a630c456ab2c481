"""Ranks that wait for each other at different operations, which would otherwise last until the timeout.

Operations that ranks meet for are numbered within a domain: the rendezvous of a group, or the collectives of the
gradients of a model. A rank that has waited for a while writes what it waits for, and how far it has come in each
domain. If rank A waits for what B has not entered, and B for what A has not, neither wait can end.

What a rank wrote stays until it waits again, which does no harm. Where all ranks enter the same operations in the same
order, each has entered a beginning of one sequence. Of two ranks, the one that wrote when it was behind waits for an
operation that the other one has entered.

Keys, below the name of the rendezvous at which the guarded step ends:

    wait/RANK      what the rank waited for last
    waits          number of waits that were written
    reader/N       rank that reads what all ranks wrote in the first N waits
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from trackbed.comm.outcomes import describe_crossing
from trackbed.comm.store import Store, StoreTampered
from trackbed.errors import CollectiveError

CHECK_SECONDS: Final = 0.25
"""Longest time between two calls of `Wait.check`."""
_SILENT_SECONDS: Final = 0.5
"""Waits that are shorter write nothing."""
_READ_SECONDS: Final = 0.7
"""Ranks that began to wait at about the same time have written by then, so that one of them reads for all."""

_WATCHES: ContextVar[tuple["CrossedWaits", ...]] = ContextVar("watches", default=())


@dataclass(frozen=True, slots=True)
class Operation:
    """Operation for which ranks meet."""

    domain: str
    """The same on all ranks that take part, and different for operations that are numbered apart."""
    position: tuple[int, ...]
    """Place in the order of the domain's operations. Rises."""
    what: str
    """Description."""
    ranks: Sequence[int] | None = None
    """Numbers in the job of the ranks that take part; None for the ranks of the guarded step."""


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """Record that a waiting rank writes."""

    operation: Operation
    entered: Mapping[str, tuple[int, ...]]
    """Position of the last operation that the rank has entered, of each domain."""

    def encode(self) -> bytes:
        """Serializes to bytes."""
        waited = self.operation
        return orjson.dumps([waited.domain, waited.position, waited.what, waited.ranks, self.entered])

    @classmethod
    def decode(cls, raw: bytes) -> "WaitRecord":
        """Parses the result of `encode`."""
        try:
            domain, position, what, ranks, entered = orjson.loads(raw)
            operation = Operation(str(domain), _position(position), str(what), ranks and tuple(map(int, ranks)))
            return cls(operation, {str(name): _position(found) for name, found in entered.items()})
        except (orjson.JSONDecodeError, ValueError, TypeError, AttributeError):
            raise StoreTampered("what a rank waits for must be as the rank wrote it, but is something else") from None

    def lacks(self, operation: Operation, rank: int) -> bool:
        """True if `rank`, which wrote this, takes part in the operation and has not entered it."""
        if operation.ranks is not None and rank not in operation.ranks:
            return False
        return self.entered.get(operation.domain, ()) < operation.position


def find_crossing(records: Mapping[int, WaitRecord]) -> tuple[list[int], list[int]] | None:
    """Finds ranks that wait for each other: the ranks at one operation, and the ranks at another. Pure.

    Args:
        records: record of each rank that has waited, by its number in the job.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for rank, record in sorted(records.items()):
        place = record.operation
        alike.setdefault((place.domain, place.position, place.ranks, tuple(sorted(record.entered.items()))), []).append(
            rank
        )
    kinds = list(alike.values())
    for number, first in enumerate(kinds):
        for second in kinds[:number]:
            one, other = records[first[0]], records[second[0]]
            crossed_first = [rank for rank in first if one.lacks(other.operation, rank)]
            crossed_second = [rank for rank in second if other.lacks(one.operation, rank)]
            if crossed_first and crossed_second:
                return crossed_second, crossed_first
    return None


class CrossedWaits:
    """Watch over the waits of the thread that runs a guarded step.

    Args:
        store: store of the step's group.
        name: name of the rendezvous at which the step ends.
        rank: number of this rank in the group.
        job_ranks: number in the job of each rank of the group.
        counts: number of operations that were entered, for each domain whose operations are entered elsewhere.
    """

    def __init__(
        self, store: Store, name: str, rank: int, job_ranks: Sequence[int], counts: Mapping[str, Callable[[], int]]
    ) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._job_ranks = tuple(job_ranks)
        self.keys_to_delete: set[str] = set()
        """Keys that this rank has written, to be deleted after the step."""
        self._thread = threading.get_ident()
        self._entered: dict[str, tuple[int, ...]] = {}
        self._counts = counts

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the waits of this thread in the block."""
        token = _WATCHES.set((*_WATCHES.get(), self))
        try:
            yield
        finally:
            _WATCHES.reset(token)

    def is_own_thread(self) -> bool:
        """True on the thread that runs the step."""
        return threading.get_ident() == self._thread

    def enter(self, operation: Operation) -> None:
        """Notes that this rank has entered an operation. Makes no request."""
        self._entered[operation.domain] = operation.position

    def write(self, operation: Operation) -> None:
        """Writes that this rank waits for an operation, and what it has entered."""
        if operation.ranks is not None and tuple(operation.ranks) == self._job_ranks:
            operation = replace(operation, ranks=None)
        counts = {domain: (number(),) for domain, number in self._counts.items()}
        key = self._key(f"wait/{self._rank}")
        self.keys_to_delete |= {key, self._key("waits")}
        # The record before the count: the rank that reads for this count must find it, as no other rank reads for that
        # count.
        self._store.set(key, WaitRecord(operation, {**self._entered, **counts}).encode())
        self._store.add(self._key("waits"), 1)

    def read(self) -> None:
        """Reads what all ranks wrote, unless another rank does."""
        # Ranks that began to wait at the same time would all read everything: the first to claim the count does it for
        # them. A rank that writes later raises the count, and reads again.
        claim = self._key(f"reader/{self._store.add(self._key('waits'), 0)}")
        if self._store.set_first(claim, b"%d" % self._rank) != b"%d" % self._rank:
            return
        self._delete_claims()
        self.keys_to_delete.add(claim)
        keys = [self._key(f"wait/{rank}") for rank in range(len(self._job_ranks))]
        if self._store.has(keys):
            found = dict(enumerate(self._store.get_all(keys)))
        else:
            found = {rank: self._store.get(key) for rank, key in enumerate(keys) if self._store.has([key])}
        records = {self._job_ranks[rank]: WaitRecord.decode(raw) for rank, raw in found.items()}
        crossing = find_crossing(records)
        if crossing is not None:
            numbers = {job_rank: rank for rank, job_rank in enumerate(self._job_ranks)}
            sides = [([numbers[one] for one in side], records[side[0]].operation.what) for side in crossing]
            raise CollectiveError(describe_crossing(sides))

    def _delete_claims(self) -> None:
        """Deletes the claims of earlier waits: a step may be as long as a training."""
        prefix = self._key("reader/")
        for key in [key for key in self.keys_to_delete if key.startswith(prefix)]:
            self._store.delete(key)
            self.keys_to_delete.remove(key)

    def _key(self, last: str) -> str:
        return f"{self._name}/{last}"


class Wait:
    """One wait of this thread for an operation.

    Args:
        operation: operation.
        watches: watches that are to know of it.
    """

    def __init__(self, operation: Operation, watches: Sequence[CrossedWaits]) -> None:
        self._operation = operation
        self._watches = watches
        self._began = time.monotonic()
        self._is_written = self._is_read = False

    @property
    def is_watched(self) -> bool:
        """True inside a step whose waits are watched."""
        return bool(self._watches)

    def check(self) -> None:
        """Writes and reads once each is due. Call it at least every `CHECK_SECONDS`.

        Raises:
            CollectiveError: this wait, or that of another rank, cannot end, because ranks wait for each other.
            StoreUnreachable: the store does not answer.
        """
        if not self._watches or self._is_read:
            return
        seconds = time.monotonic() - self._began
        if not self._is_written and seconds >= _SILENT_SECONDS:
            self._is_written = True
            for watch in self._watches:
                watch.write(self._operation)
        elif self._is_written and seconds >= _READ_SECONDS:
            self._is_read = True
            for watch in self._watches:
                watch.read()


def begin_wait(operation: Operation) -> Wait:
    """Notes that this thread enters an operation, for which it may have to wait. Makes no request."""
    # A context may be copied to another thread, whose waits have no place in the order of the step's.
    watches = [watch for watch in _WATCHES.get() if watch.is_own_thread()]
    for watch in watches:
        watch.enter(operation)
    return Wait(operation, watches)


def _position(found: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(number) for number in found)
