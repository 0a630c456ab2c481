"""A small key-value store that all ranks of a group reach: what their meetings are held over."""

import threading
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Bell", "MemoryStore", "Store", "StoreTampered", "StoreUnreachable"]


class StoreUnreachable(Exception):  # noqa: N818  it never leaves a step
    """Whoever holds the store does not answer. A group turns it into a CollectiveError."""


class StoreTampered(StoreUnreachable):
    """A key is not as the ranks left it: another process deleted or changed it. Carries none of what it wrote."""


class Bell(Protocol):
    """Somebody who listens for a key, and costs the store nothing while doing so."""

    def has_rung(self) -> bool:
        """Whether the key was there at some time since. At once.

        Raises:
            StoreUnreachable: that will never be known.
        """
        ...

    def wait(self, seconds: float) -> bool:
        """Return as soon as `has_rung`, or after `seconds`; the answer is what `has_rung` says then.

        Raises:
            StoreUnreachable: that will never be known.
        """
        ...


class Store(Protocol):
    """What is needed of the stores of `torch.distributed`. Each method but `listen` is one request.

    Every method raises StoreUnreachable where the store does not answer, and StoreTampered where a key that must be
    there is missing.
    """

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, whatever was there."""
        ...

    def set_first(self, key: str, value: bytes) -> bytes:
        """Put `value` under `key` unless something is there. Returns what is there then."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        ...

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are all there."""
        ...

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are there."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at zero. Returns the sum."""
        ...

    def delete(self, key: str) -> None:
        """Forget `key`, if it is there."""
        ...

    def listen(self, key: str) -> Bell:
        """A bell that rings when `key` is there. It has to ring before the key is deleted."""
        ...


class MemoryStore:
    """A store for the threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bells: dict[str, list[MemoryBell]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, whatever was there."""
        with self._lock:
            self._put(key, value)

    def set_first(self, key: str, value: bytes) -> bytes:
        """Put `value` under `key` unless something is there. Returns what is there then."""
        with self._lock:
            if key not in self._values:
                self._put(key, value)
            return self._values[key]

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are all there."""
        with self._lock:
            for key in keys:
                if key not in self._values:
                    msg = f"{key!r} must be there, but is gone"
                    raise StoreTampered(msg)
            return [self._values[key] for key in keys]

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are there."""
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at zero. Returns the sum."""
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, b"%d" % total)
            return total

    def delete(self, key: str) -> None:
        """Forget `key`, if it is there."""
        with self._lock:
            self._values.pop(key, None)

    def listen(self, key: str) -> "MemoryBell":
        """A bell that rings when `key` is there."""
        bell = MemoryBell()
        with self._lock:
            if key in self._values:
                bell.ring()
            else:
                self._bells.setdefault(key, []).append(bell)
        return bell

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for bell in self._bells.pop(key, []):
            bell.ring()


class MemoryBell:
    """A bell that the thread which sets its key rings."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        """Let `has_rung` be true from now on."""
        self._event.set()

    def has_rung(self) -> bool:
        """Whether the key was there at some time since."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Return as soon as `has_rung`, or after `seconds`; the answer is what `has_rung` says then."""
        return self._event.wait(seconds)
