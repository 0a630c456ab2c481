"""One rank's participation in a group: its record, the records of the other ranks, and which of them have ended."""

import os
import select
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from trackbed.comm.store import Store, StoreTampered

_MOST_RANKS: Final = 1 << 14
_END_MILLISECONDS: Final = 1000
_UNKNOWN: Final = -1


@dataclass(slots=True)
class Peers:
    """Other ranks on this host: one that has ended is noticed at once, not after a timeout.

    Each process writes one of its ranks below a key of its host, and opens a file descriptor (pidfd) for each of the
    others, which becomes readable when that process ends. Ranks that share neither a host nor a namespace of process
    numbers do not see each other, and are noticed by their silence.

    What one group of a job has found out about a process serves all groups that its rank belongs to, also before their
    first collective.
    """

    rank: int = 0
    job_ranks: Sequence[int] = ()
    """Number of each rank in the job; empty if they are the same."""
    known: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Process, and when it began, of ranks of the job on this host, by their number in the job. Groups share it."""
    has_met: bool = False
    """True once all ranks of the host are known."""
    _opened: set[int] = field(default_factory=set)
    """Numbers in the job of the ranks that are watched."""
    _descriptors: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rank and process of each pidfd."""
    _ended: dict[int, int] = field(default_factory=dict)
    """Process of each rank that has ended."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def announce(self, store: Store) -> None:
        """Tells the other ranks of this host the process of this one.

        Of ranks that are threads of one process, one is enough: they end together.
        """
        host = _host()
        if host is None:
            return
        process, start = os.getpid(), _start_of(os.getpid())
        if start == _UNKNOWN:
            return
        if store.add(f"{host}/process/{process}.{start}", 1) == 1:
            number = store.add(f"{host}/count", 1)
            store.set(f"{host}/{number}", orjson.dumps([self.rank, process, start]))

    def meet(self, store: Store, *, is_complete: bool = True) -> None:
        """Learns the processes of the other ranks of this host, and opens them.

        Args:
            store: the store in which they were announced.
            is_complete: True if all ranks have announced themselves; False to learn the ranks that have.
        """
        self.has_met = self.has_met or is_complete
        host = _host()
        count = store.add(f"{host}/count", 0) if host is not None else 0
        if not 0 <= count <= _MOST_RANKS:
            raise StoreTampered(f"'{host}/count' must be a number of ranks, but is {count}")
        keys = [f"{host}/{number}" for number in range(1, count + 1)]
        # A rank raises the count before it writes its key. One that is between the two is found the next time.
        if not is_complete and not (keys and store.has(keys)):
            keys = [key for key in keys if store.has([key])]
        for raw in store.get_all(keys) if keys else ():
            rank, process, start = _parsed(raw)
            # Ranks may be threads of one process.
            if rank != self.rank and process != os.getpid():
                self.known.setdefault(self._number_of(rank), (process, start))
        self.ended()

    def ended(self, *, wait_for: int | None = None) -> dict[int, int]:
        """Process of each rank of this host that has ended, by rank. Thread-safe; makes no request.

        Args:
            wait_for: a rank whose connections were closed: its process, if it is one of this host, has a second to end.
                The system closes the connections of a process that is killed a little before it tells of its end.
        """
        with self._lock:
            # Under the lock: a descriptor that two threads find readable would be closed twice, and the second time it
            # may be another file's.
            if len(self._opened) < len(self.known):
                self._open_known()
            if self._descriptors:
                if awaited := [one for one, (rank, _) in self._descriptors.items() if rank == wait_for]:
                    _poll(awaited, _END_MILLISECONDS)
                for descriptor in _poll(self._descriptors, 0):
                    rank, process = self._descriptors.pop(descriptor)
                    os.close(descriptor)
                    self._ended[rank] = process
            return dict(self._ended)

    def _number_of(self, rank: int) -> int:
        return self.job_ranks[rank] if self.job_ranks else rank

    def _open_known(self) -> None:
        """Opens the processes of this group's ranks that have become known."""
        own = {number: rank for rank, number in enumerate(self.job_ranks)} if self.job_ranks else None
        for number, (process, start) in list(self.known.items()):
            if number not in self._opened:
                self._opened.add(number)
                rank = number if own is None else own.get(number, -1)
                if rank not in (-1, self.rank):
                    self._open(rank, process, start)

    def _open(self, rank: int, process: int, start: int) -> None:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            self._ended[rank] = process
            return
        except OSError:
            return  # the system has no such descriptors, or no more of them: silence remains
        # Between the exchange and here the process may have ended, and another one may have its number.
        found = _start_of(process)
        if found == _UNKNOWN and not _poll([descriptor], 0):
            os.close(descriptor)  # as where no file can be opened: silence remains
            return
        if found != start:
            os.close(descriptor)
            self._ended[rank] = process
            return
        self._descriptors[descriptor] = (rank, process)

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def _poll(descriptors: Iterable[int], milliseconds: int) -> list[int]:
    """Waits until one of these pidfds is readable. Returns all readable ones."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(milliseconds)]


def _host() -> str | None:
    """Key of this host and its namespace of process numbers; None if the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"host/{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return None


def _start_of(process: int) -> int:
    """Time at which a process began, in ticks since the system did; `_UNKNOWN` if the system does not tell."""
    try:
        # The second field is a name in parentheses, which may hold anything.
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return _UNKNOWN


def _parsed(raw: bytes) -> tuple[int, int, int]:
    try:
        found: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, list) or len(found) != 3 or not all(type(one) is int for one in found) or found[1] <= 0:
        raise StoreTampered("the process of a rank must be one that the rank wrote, but is something else")
    return found[0], found[1], found[2]


_NUM_FIELDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Data that a rank brings to a rendezvous."""

    value: bytes = b"null"
    """JSON."""
    is_done: bool = True
    """False if the rank failed, or was stopped because another rank failed."""
    taken: Mapping[str, list[int]] = field(default_factory=dict)
    """Numbers that the rank took from each shared counter since the last rendezvous."""
    operation: str = ""
    """Operation that the rendezvous belongs to; empty outside of a training loop that is watched."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Last record that a rank wrote about itself."""

    rendezvous: str
    """Name of the rendezvous at which the rank arrived last; empty if at none."""
    heartbeats: int
    """Number of records that the rank has written, at least 1."""
    value: Any
    """Value that the rank brought to the rendezvous."""
    status: Any = None
    """Status that the rank published last."""
    is_done: bool = True
    """False if the rank arrived because it, or another rank, had failed."""
    taken: Mapping[str, list[int]] = field(default_factory=dict)
    """Numbers that the rank took from each shared counter."""
    operation: str = ""
    """Operation that the rendezvous belongs to; empty where that is not compared."""

    @classmethod
    def parse(cls, raw: bytes) -> "RankRecord":
        """Parses the value of a rank's key."""
        try:
            fields = orjson.loads(raw)
        except orjson.JSONDecodeError:
            fields = None
        if not isinstance(fields, list) or not 3 <= len(fields) <= _NUM_FIELDS or not isinstance(fields[1], int):
            raise StoreTampered("the record of a rank must be one that the rank wrote, but is something else")
        return cls(*fields)


@dataclass(slots=True)
class Participant:
    """A rank of a group.

    Each rank has one key, which it overwrites when it arrives at a rendezvous and with every heartbeat. Any new record
    there shows that the rank is alive.
    """

    store: Store
    rank: int
    size: int
    timeout_seconds: float
    store_host: int | None = None
    """Rank whose process hosts the store, which ends with that process; None if none of the ranks does."""
    peers: Peers = field(default_factory=Peers)
    """Processes of the other ranks on this host."""
    domain: str = ""
    """Name of the group, which no other group of its ranks has."""
    _rendezvous: str = ""
    _arrival: Arrival = field(default_factory=Arrival)
    _status: bytes = b"null"
    _heartbeats: int = 0
    _seen: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def job_ranks(self) -> Sequence[int]:
        """Number of each rank in the job."""
        return self.peers.job_ranks or range(self.size)

    def arrive(self, rendezvous: str, arrival: Arrival) -> None:
        """Writes that this rank has arrived at a rendezvous, and the data that it brings."""
        # The lock spans the request. Records of two threads that overtake each other would take back an arrival, or let
        # the number of heartbeats fall, which counts as silence.
        with self._lock:
            self._rendezvous, self._arrival = rendezvous, arrival
            self._write()

    def set_status(self, value: bytes) -> None:
        """Sets the status, in JSON, that is part of every further record of this rank. Thread-safe."""
        with self._lock:
            self._status = value

    def send_heartbeat(self) -> None:
        """Writes the last record again with the next heartbeat number. Thread-safe."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        self._heartbeats += 1
        arrival = self._arrival
        value, status = orjson.Fragment(arrival.value), orjson.Fragment(self._status)
        fields = [self._rendezvous, self._heartbeats, value]
        if self._status != b"null" or not arrival.is_done or arrival.taken or arrival.operation:
            fields += [status, arrival.is_done, dict(arrival.taken), arrival.operation]  # most records do without
        self.store.set(_key(self.rank), orjson.dumps(fields))
        self._seen.add(self.rank)

    def read_all(self) -> list[RankRecord]:
        """Reads the records of all ranks, each of which must have written one."""
        return [RankRecord.parse(raw) for raw in self.store.get_all(self._keys())]

    def read_present(self) -> dict[int, RankRecord | None]:
        """Reads the record of each rank; None for a rank that has not written one yet."""
        keys = self._keys()
        if self.store.has(keys):
            records: dict[int, RankRecord | None] = dict(enumerate(self.read_all()))
        else:
            records = {
                rank: RankRecord.parse(self.store.get(key)) if self.store.has([key]) else None
                for rank, key in enumerate(keys)
            }
        there = {rank for rank, record in records.items() if record is not None}
        if self._seen - there:
            raise StoreTampered(f"{_key(min(self._seen - there))!r} must be there, but is gone")
        self._seen |= there
        return records

    def _keys(self) -> list[str]:
        return [_key(rank) for rank in range(self.size)]


def _key(rank: int) -> str:
    return f"rank/{rank}"
