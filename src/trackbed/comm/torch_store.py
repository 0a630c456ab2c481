"""The key-value stores of `torch.distributed`, made so that nobody hangs on them."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch does not say so

from trackbed.comm.store import StoreTampered, StoreUnreachable
from trackbed.comm.worker import Worker

__all__ = ["AnsweringStore", "connect_to", "share_store"]

# TCPStore writes two lines to standard error whenever a wait of its own ends without the key.
_LISTEN_SECONDS: Final = 3600.0
_NOTHING: Final = b"\0nothing is there"
"""Returned for a key that is not there; no rank writes it."""


@dataclass(frozen=True, slots=True)
class _Listener:
    """A connection on which one wait at a time can be under way, and the thread that is in it."""

    worker: Worker
    connections: list[Store]


class AnsweringStore:
    """A store of torch's, of which one can stop expecting an answer.

    A request to a TCPStore whose host is stopped never returns, does not hear Ctrl-C, and a wait keeps its
    connection to itself. So requests are made by a thread, and waits by others, each on a connection of its own.

    Args:
        store: for requests.
        connect: gives a connection to the same keys; called on the threads that wait.
        answer_seconds: how long an answer may take.
    """

    def __init__(self, store: Store, connect: Callable[[], Store], *, answer_seconds: float) -> None:
        self._store: Any = store  # torch's own types know nothing of bytes
        self._connect = connect
        self._answer_seconds = answer_seconds
        self._worker = Worker()
        self._idle: list[_Listener] = []

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, whatever was there."""
        self._ask(lambda: self._store.set(key, value))

    def set_first(self, key: str, value: bytes) -> bytes:
        """Put `value` under `key` unless something is there. Returns what is there then."""
        return bytes(self._ask(lambda: self._store.compare_set(key, b"", value)))

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._held(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are all there."""
        if not self.has(keys):  # torch's would wait for them
            missing = next((key for key in keys if not self.has([key])), keys[0])
            raise _gone(missing)
        return list(self._ask(lambda: self._store.multi_get(list(keys))))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are there."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at zero. Returns the sum."""
        try:
            return int(self._ask(lambda: self._store.add(key, amount)))
        except StoreUnreachable:
            # The server hangs up on whoever adds to what is no number. On a new connection it tells what is there.
            self._store = self._ask(self._connect)
            if self.has([key]) and not _is_number(self._held(key)):
                msg = f"{key!r} must be a number, but is something else"
                raise StoreTampered(msg) from None
            raise

    def delete(self, key: str) -> None:
        """Forget `key`, if it is there."""
        self._ask(lambda: self._store.delete_key(key))

    def listen(self, key: str) -> "ListeningBell":
        """A bell that rings when `key` is there."""
        listener = self._idle.pop() if self._idle else _Listener(Worker(), [])
        connect, idle = self._connect, self._idle

        def wait() -> None:
            if not listener.connections:
                listener.connections.append(connect())
            _wait_for(key, listener.connections[0])
            idle.append(listener)

        return ListeningBell(listener.worker.submit(wait))

    def _held(self, key: str) -> bytes:
        # torch's `get` would wait for a key that is not there.
        value = bytes(self._ask(lambda: self._store.compare_set(key, _NOTHING, _NOTHING)))
        if value == _NOTHING:
            raise _gone(key)
        return value

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return self._worker.submit(call).result(self._answer_seconds)
        except TimeoutError:
            msg = f"no answer for {self._answer_seconds:g} s"
            raise StoreUnreachable(msg) from None
        except RuntimeError as error:
            raise _unreachable(error) from None


class ListeningBell:
    """A bell that rings when a thread comes back from its wait."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def has_rung(self) -> bool:
        """Whether the key was there at some time since."""
        if not self._future.done():
            return False
        error = self._future.exception()
        if error is not None:
            raise _unreachable(error) from None
        return True

    def wait(self, seconds: float) -> bool:
        """Return as soon as `has_rung`, or after `seconds`; the answer is what `has_rung` says then."""
        try:
            self._future.exception(seconds)
        except TimeoutError:
            return False
        return self.has_rung()


def connect_to(host: str, port: int, *, timeout_seconds: float) -> TCPStore:
    """A connection of its own to the TCPStore that listens there.

    Raises:
        RuntimeError: nobody does, for `timeout_seconds`.
    """
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))


def share_store(store: Store, prefix: str, *, timeout_seconds: float) -> AnsweringStore:
    """The keys below `prefix` in `store`, whatever prefix that has itself, for a group with that timeout."""
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    # Who waits asks whether somebody watches after half of the timeout, and the other half is for the answer.
    answer_seconds = timeout_seconds / 2
    connect = partial(_connect_again, base, prefix, timeout_seconds)
    return AnsweringStore(PrefixStore(prefix, base), connect, answer_seconds=answer_seconds)


def _connect_again(base: Store, prefix: str, timeout_seconds: float) -> Store:
    if isinstance(base, TCPStore):
        base = connect_to(base.host, base.port, timeout_seconds=timeout_seconds)
    return PrefixStore(prefix, base)


def _wait_for(key: str, connection: Store) -> None:
    while True:
        began = time.monotonic()
        try:
            connection.wait([key], timedelta(seconds=_LISTEN_SECONDS))
        except RuntimeError:
            # Not all stores say in an error's type that the time was over.
            if time.monotonic() - began < _LISTEN_SECONDS:
                raise
        else:
            return


def _gone(key: str) -> StoreTampered:
    return StoreTampered(f"{key!r} must be there, but is gone")


def _is_number(value: bytes) -> bool:
    return value.removeprefix(b"-").isdigit() and len(value) < 20


def _unreachable(error: BaseException) -> StoreUnreachable:
    words = str(error).partition("\n")[0]
    return StoreUnreachable(f"{type(error).__name__}: {words}")
