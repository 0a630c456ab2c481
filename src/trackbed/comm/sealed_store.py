"""Store whose values carry a message authentication code, so that only processes with the secret can write them.

A sealed value is the HMAC-SHA256 of the key and the value under the secret, followed by the value:

    0    32 bytes    HMAC-SHA256(secret, length of the path as 8 bytes, little-endian | path | value)
    32   the rest    value

The path of a key is the path of its group, empty but for children of groups, followed by the key. As the code covers
it, a value cannot be moved to another key, nor to another group. Flags and counters carry no code: the existence
of a key, and numbers, are only ever hints. See `trackbed.comm.rendezvous`.
"""

import hmac
from collections.abc import Sequence
from typing import Final

from trackbed.comm.store import KeyWatch, Store, StoreTampered

_CODE_BYTES: Final = 32


class SealedStore:
    """Store that rejects every value that was written without the secret.

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
