"""Key-value stores that all ranks of a group share, and watches of their keys."""

import copy
import hmac
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol, Self


class StoreUnreachable(Exception):  # noqa: N818  it never leaves a step
    """The host of the store does not answer. A group converts this to a CollectiveError."""


class StoreClosed(StoreUnreachable):
    """The connection to the store is closed, as when the process of its host ends."""


class StoreTampered(StoreUnreachable):
    """Another process has deleted or changed a key. The message contains nothing that the other process wrote."""


class HostAware:
    """Store that gives up waiting for an answer once the process of its host has ended."""

    has_host_ended: Callable[[], bool] = staticmethod(lambda: False)
    """True if it has. Set by the group that uses the store."""


class KeyWatch(Protocol):
    """Watch that fires when a key exists; costs the store nothing until then."""

    def has_fired(self) -> bool:
        """True if the key has existed at some time since the watch was created. Does not block."""
        ...

    def wait(self, seconds: float) -> bool:
        """Waits until the watch fires, for at most `seconds`. Returns the value of `has_fired` then."""
        ...


class Store(Protocol):
    """Operations that groups need of the stores of `torch.distributed`. Each method except `watch` is one request.

    Every method raises StoreUnreachable if the store does not answer, and StoreTampered if a key that must exist is
    missing.
    """

    def set(self, key: str, value: bytes) -> None:
        """Sets `key` to `value`, replacing any previous value."""
        ...

    def set_first(self, key: str, value: bytes) -> bytes:
        """Sets `key` to `value` unless the key exists. Returns the value that the key has then."""
        ...

    def get(self, key: str) -> bytes:
        """Returns the value of an existing key."""
        ...

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of keys that all exist."""
        ...

    def has(self, keys: Sequence[str]) -> bool:
        """True if all of these keys exist."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that starts at zero. Returns the sum."""
        ...

    def delete(self, key: str) -> None:
        """Deletes `key`, if it exists."""
        ...

    def watch(self, key: str) -> KeyWatch:
        """Creates a watch that fires when `key` exists. It must fire before the key is deleted."""
        ...


class Connection(Store, Protocol):
    """Store that can open further connections to the same server."""

    @property
    def name(self) -> str:
        """Name of the keys, the same for all ranks that share them, and different from that of others they share."""
        ...

    def below(self, name: str) -> "Connection":
        """Opens a store of the keys below `name`, for another thread: no request of one waits for one of the other.

        Raises:
            StoreUnreachable: the store does not answer.
        """
        ...


class MemoryStore:
    """Store in memory, for the threads of one process."""

    def __init__(self) -> None:
        self._prefix = ""
        # Shared with the stores below.
        self._values: dict[str, bytes] = {}
        self._watches: dict[str, list[MemoryKeyWatch]] = {}
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the keys."""
        return f"{id(self._values)}/{self._prefix}"

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: str, value: bytes) -> None:
        """Sets `key` to `value`, replacing any previous value."""
        with self._lock:
            self._put(key, value)

    def set_first(self, key: str, value: bytes) -> bytes:
        """Sets `key` to `value` unless the key exists. Returns the value that the key has then."""
        path = self._prefix + key
        with self._lock:
            if path not in self._values:
                self._put(key, value)
            return self._values[path]

    def get(self, key: str) -> bytes:
        """Returns the value of an existing key."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of keys that all exist."""
        with self._lock:
            for key in keys:
                if self._prefix + key not in self._values:
                    raise StoreTampered(f"{key!r} must be there, but is gone")
            return [self._values[self._prefix + key] for key in keys]

    def has(self, keys: Sequence[str]) -> bool:
        """True if all of these keys exist."""
        with self._lock:
            return all(self._prefix + key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that starts at zero. Returns the sum."""
        with self._lock:
            total = int(self._values.get(self._prefix + key, b"0")) + amount
            self._put(key, b"%d" % total)
            return total

    def delete(self, key: str) -> None:
        """Deletes `key`, if it exists."""
        with self._lock:
            self._values.pop(self._prefix + key, None)

    def watch(self, key: str) -> "MemoryKeyWatch":
        """Creates a watch that fires when `key` exists."""
        watch, path = MemoryKeyWatch(), self._prefix + key
        with self._lock:
            # Under the lock: a key that another thread sets between this look and the entry in the list would never
            # fire the watch.
            if path in self._values:
                watch.fire()
            else:
                self._watches.setdefault(path, []).append(watch)
        return watch

    def below(self, name: str) -> Self:
        """Returns a store of the keys below `name`. No request blocks."""
        below = copy.copy(self)
        below._prefix = f"{self._prefix}{name}/"  # noqa: SLF001  an object of this class
        return below

    def _put(self, key: str, value: bytes) -> None:
        self._values[self._prefix + key] = value
        for watch in self._watches.pop(self._prefix + key, []):
            watch.fire()


class MemoryKeyWatch:
    """Watch that the thread which sets its key fires."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def fire(self) -> None:
        """Makes `has_fired` true from now on."""
        self._event.set()

    def has_fired(self) -> bool:
        """True if the key has existed at some time since the watch was created."""
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits until the watch fires, for at most `seconds`. Returns the value of `has_fired` then."""
        return self._event.wait(seconds)


_CODE_BYTES: Final = 32


class SealedStore:
    """Store that rejects every value that was written without the secret, by a message authentication code.

    A sealed value is the HMAC-SHA256 of the key and the value under the secret, followed by the value:

        0    32 bytes    HMAC-SHA256(secret, length of the path as 8 bytes, little-endian | path | value)
        32   the rest    value

    The path of a key is the path of its group, empty but for children of groups, followed by the key. As the code
    covers it, a value cannot be moved to another key, nor to another group. Flags and counters carry no code: the
    existence of a key, and numbers, are only ever hints. See `trackbed.comm.rendezvous`.

    Args:
        store: underlying store.
        secret: the same in all processes that use these keys.
        path: path of the group whose keys `store` has.
        prefix: prefix of all keys in `store`.
    """

    def __init__(self, store: Store, secret: bytes, *, path: str = "", prefix: str = "") -> None:
        self._store = store
        self._secret = secret
        self._path = path
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        """Sets `key` to `value`, replacing any previous value."""
        self._store.set(self._prefix + key, self._sealed(key, value))

    def set_first(self, key: str, value: bytes) -> bytes:
        """Sets `key` to `value` unless the key exists. Returns the value that the key has then."""
        return self._opened(key, self._store.set_first(self._prefix + key, self._sealed(key, value)))

    def get(self, key: str) -> bytes:
        """Returns the value of an existing key."""
        return self._opened(key, self._store.get(self._prefix + key))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of keys that all exist."""
        values = self._store.get_all([self._prefix + key for key in keys])
        return [self._opened(key, value) for key, value in zip(keys, values, strict=True)]

    def has(self, keys: Sequence[str]) -> bool:
        """True if all of these keys exist."""
        return self._store.has([self._prefix + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that starts at zero. Returns the sum, which other processes may have changed."""
        return self._store.add(self._prefix + key, amount)

    def delete(self, key: str) -> None:
        """Deletes `key`, if it exists."""
        self._store.delete(self._prefix + key)

    def watch(self, key: str) -> KeyWatch:
        """Creates a watch that fires when `key` exists, even if it was set without the secret."""
        return self._store.watch(self._prefix + key)

    def _sealed(self, key: str, value: bytes) -> bytes:
        return self._code(key, value) + value

    def _opened(self, key: str, sealed: bytes) -> bytes:
        value = sealed[_CODE_BYTES:]
        if not hmac.compare_digest(sealed[:_CODE_BYTES], self._code(key, value)):
            raise StoreTampered(
                f"{key!r} must have been written with the secret that the ranks share, but was not (the error is the "
                "same for ranks whose secrets differ, because they read them from different folders)"
            )
        return value

    def _code(self, key: str, value: bytes) -> bytes:
        path = (self._path + self._prefix + key).encode()
        return hmac.digest(self._secret, len(path).to_bytes(8, "little") + path + value, "sha256")
