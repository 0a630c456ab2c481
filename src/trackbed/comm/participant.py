"""One rank's part in a group: what it writes of itself, and what it reads of the others."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from trackbed.comm.store import Store, StoreTampered

__all__ = ["Arrival", "Member", "Record"]

_NUM_FIELDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a rank brings to a meeting."""

    value: bytes = b"null"
    """JSON."""
    is_done: bool = True
    """False if it failed, or was stopped because another rank had."""
    taken: Mapping[str, list[int]] = field(default_factory=dict)
    """Numbers that it took from each shared counter since the last meeting."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a rank last wrote of itself."""

    meeting: str
    """Name of the meeting that it last came to; empty if it came to none."""
    signs: int
    """How often it has written, at least 1."""
    value: Any
    """What it brought to the meeting."""
    told: Any = None
    """What it last told of itself."""
    is_done: bool = True
    """False if it came because it, or another rank, had failed."""
    taken: Mapping[str, list[int]] = field(default_factory=dict)
    """Numbers that it took from each shared counter."""

    @classmethod
    def parse(cls, raw: bytes) -> "Record":
        """Parse the value of a rank's key.

        Raises:
            StoreTampered: no rank wrote it.
        """
        try:
            fields = orjson.loads(raw)
        except orjson.JSONDecodeError:
            fields = None
        if not isinstance(fields, list) or not 3 <= len(fields) <= _NUM_FIELDS or not isinstance(fields[1], int):
            msg = "the record of a rank must be one that it wrote, but is something else"
            raise StoreTampered(msg)
        return cls(*fields)


@dataclass(slots=True)
class Member:
    """A rank of a group.

    Each has one key, which it writes over and over: when it comes to a meeting, and as a sign of life. Whatever
    changes there says that the rank lives.
    """

    store: Store
    rank: int
    size: int
    timeout_seconds: float
    store_host: int | None = None
    """The rank whose process holds the store, which is gone when that ends; None if none of the ranks does."""
    _meeting: str = ""
    _arrival: Arrival = field(default_factory=Arrival)
    _told: bytes = b"null"
    _signs: int = 0
    _seen: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def come(self, meeting: str, arrival: Arrival) -> None:
        """Write that this rank has come to a meeting, and what it brings."""
        with self._lock:
            self._meeting, self._arrival = meeting, arrival
            self._write()

    def tell(self, value: bytes) -> None:
        """Have a value in JSON go out with whatever this rank writes next. For any thread."""
        with self._lock:
            self._told = value

    def give_sign(self) -> None:
        """Write the same again, but for a number that says that this rank lives. For any thread."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        self._signs += 1
        arrival = self._arrival
        value, told = orjson.Fragment(arrival.value), orjson.Fragment(self._told)
        said = [self._meeting, self._signs, value]
        if self._told != b"null" or not arrival.is_done or arrival.taken:  # most ranks most of the time have no more
            said += [told, arrival.is_done, dict(arrival.taken)]
        self.store.set(_key(self.rank), orjson.dumps(said))
        self._seen.add(self.rank)

    def read_all(self) -> list[Record]:
        """Records of all ranks, each of which has written.

        Raises:
            StoreTampered: one of them is gone, or no rank wrote it.
        """
        return [Record.parse(raw) for raw in self.store.get_all(self._keys())]

    def look(self) -> dict[int, Record | None]:
        """Last record of each rank; None for one that has not written yet.

        Raises:
            StoreTampered: one that was there is gone, or no rank wrote it.
        """
        keys = self._keys()
        if self.store.has(keys):
            found: dict[int, Record | None] = dict(enumerate(self.read_all()))
        else:
            found = {
                rank: Record.parse(self.store.get(key)) if self.store.has([key]) else None
                for rank, key in enumerate(keys)
            }
        there = {rank for rank, record in found.items() if record is not None}
        if self._seen - there:
            msg = f"{_key(min(self._seen - there))!r} must be there, but is gone"
            raise StoreTampered(msg)
        self._seen |= there
        return found

    def _keys(self) -> list[str]:
        return [_key(rank) for rank in range(self.size)]


def _key(rank: int) -> str:
    return f"rank/{rank}"
