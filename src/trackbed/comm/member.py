"""One rank's part in a group: what it writes of itself, and what it reads of the others."""

import threading
from dataclasses import dataclass, field
from typing import Any

import orjson

from trackbed.comm.store import Store

__all__ = ["Member", "Record", "parse_record"]


@dataclass(frozen=True, slots=True)
class Record:
    """What a rank last wrote of itself."""

    meeting: str
    """Name of the meeting that it last came to; empty if it came to none."""
    value: Any
    """What it brought there."""
    told: Any = None
    """What it last told of itself."""


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
    _value: bytes = b"null"
    _told: bytes = b"null"
    _signs: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def come(self, meeting: str, value: bytes) -> None:
        """Write that this rank has come to a meeting, with a value in JSON."""
        with self._lock:
            self._meeting, self._value = meeting, value
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
        said = [self._meeting, self._signs, orjson.Fragment(self._value)]
        if self._told != b"null":
            said.append(orjson.Fragment(self._told))
        self.store.set(f"rank/{self.rank}", orjson.dumps(said))

    def read(self, rank: int) -> Record:
        """What a rank that has written wrote last."""
        return parse_record(self.store.get(f"rank/{rank}"))

    def read_all(self) -> list[Record]:
        """What all ranks, each of which has written, wrote last."""
        return [parse_record(raw) for raw in self.store.get_all(self._keys())]

    def look(self) -> dict[int, bytes | None]:
        """What each rank wrote last, as it stands in the store; None for one that has not written yet."""
        keys = self._keys()
        if self.store.has(keys):
            return dict(enumerate(self.store.get_all(keys)))
        return {rank: self.store.get(key) if self.store.has([key]) else None for rank, key in enumerate(keys)}

    def _keys(self) -> list[str]:
        return [f"rank/{rank}" for rank in range(self.size)]


def parse_record(raw: bytes) -> Record:
    """What `raw`, from a rank's key, says."""
    meeting, _, value, *told = orjson.loads(raw)
    return Record(meeting, value, *told)
