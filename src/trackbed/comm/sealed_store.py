"""Values that only holders of a secret can write: each carries a message authentication code.

A sealed value is the HMAC-SHA256, under the secret, of its key and itself, and then the value:

    0    32 bytes    HMAC-SHA256(secret, length of the key as 8 bytes, little-endian | key | value)
    32   the rest    value

As the key is covered, a value cannot be moved to another key. Bells and counters carry no code: that a key is there,
and numbers, are never more than hints. See `Meeting`.
"""

import hmac
from collections.abc import Sequence
from typing import Final

from trackbed.comm.store import Bell, Store, StoreTampered

__all__ = ["SealedStore"]

_CODE_BYTES: Final = 32


class SealedStore:
    """A store of which one believes nothing that was written without the secret.

    Args:
        store: where the values are.
        secret: the same for all who use these keys.
        prefix: what its keys begin with in `store`.
    """

    def __init__(self, store: Store, secret: bytes, prefix: str = "") -> None:
        self._store = store
        self._secret = secret
        self._prefix = prefix

    def below(self, name: str) -> "SealedStore":
        """The keys under `name`, in a place of their own."""
        return SealedStore(self._store, self._secret, f"{self._prefix}{name}/")

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, whatever was there."""
        self._store.set(self._prefix + key, self._sealed(key, value))

    def set_first(self, key: str, value: bytes) -> bytes:
        """Put `value` under `key` unless something is there. Returns what is there then."""
        return self._opened(key, self._store.set_first(self._prefix + key, self._sealed(key, value)))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._opened(key, self._store.get(self._prefix + key))

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are all there."""
        values = self._store.get_all([self._prefix + key for key in keys])
        return [self._opened(key, value) for key, value in zip(keys, values, strict=True)]

    def has(self, keys: Sequence[str]) -> bool:
        """True if all of these keys are there."""
        return self._store.has([self._prefix + key for key in keys])

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at zero. Returns the sum, which others may have changed."""
        return self._store.add(self._prefix + key, amount)

    def delete(self, key: str) -> None:
        """Forget `key`, if it is there."""
        self._store.delete(self._prefix + key)

    def listen(self, key: str) -> Bell:
        """A bell that rings when `key` is there, whoever put it there."""
        return self._store.listen(self._prefix + key)

    def _sealed(self, key: str, value: bytes) -> bytes:
        return self._code(key, value) + value

    def _opened(self, key: str, sealed: bytes) -> bytes:
        value = sealed[_CODE_BYTES:]
        if not hmac.compare_digest(sealed[:_CODE_BYTES], self._code(key, value)):
            msg = (
                f"{key!r} must have been written with the secret that the ranks share, but was not (ranks whose "
                "secrets differ, because they read them from different folders, look the same)"
            )
            raise StoreTampered(msg)
        return value

    def _code(self, key: str, value: bytes) -> bytes:
        name = (self._prefix + key).encode()
        return hmac.digest(self._secret, len(name).to_bytes(8, "little") + name + value, "sha256")
