"""One rank's participation in a group: the record that it writes, and those that it reads of the other ranks."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from trackbed.comm.peers import Peers
from trackbed.comm.store import Store, StoreTampered

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
            found: dict[int, RankRecord | None] = dict(enumerate(self.read_all()))
        else:
            found = {
                rank: RankRecord.parse(self.store.get(key)) if self.store.has([key]) else None
                for rank, key in enumerate(keys)
            }
        there = {rank for rank, record in found.items() if record is not None}
        if self._seen - there:
            raise StoreTampered(f"{_key(min(self._seen - there))!r} must be there, but is gone")
        self._seen |= there
        return found

    def _keys(self) -> list[str]:
        return [_key(rank) for rank in range(self.size)]


def _key(rank: int) -> str:
    return f"rank/{rank}"
