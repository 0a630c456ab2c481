"""Key-value stores of `torch.distributed`, with a timeout on every request."""

import resource
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # torch does not say so

from trackbed.comm.blocking_calls import Worker
from trackbed.comm.store import HostAware, KeyWatch, StoreClosed, StoreTampered, StoreUnreachable

# TCPStore writes two lines to standard error whenever a wait of its own times out.
_WAIT_SECONDS: Final = 3600.0
_SLICE_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.02
_MOST_CONNECT_SECONDS: Final = 120.0
"""A store that this process was connected to is lost if it takes no further connection for so long."""
_PROBE_SECONDS: Final = 5.0
_NOTHING: Final = b"\0nothing is there"
"""Returned for a missing key; no rank writes it."""


@dataclass(frozen=True, slots=True)
class _WaitingConnection:
    """Connection that carries one wait at a time, and the thread that waits on it."""

    worker: Worker
    connections: list[Store]


class TimeoutStore(HostAware):
    """Store of `torch.distributed` whose requests time out.

    A request to a TCPStore whose host is stopped never returns and ignores Ctrl-C, and a wait blocks its connection. So
    one thread makes the requests, and other threads wait, each on a connection of its own.

    After one request without an answer, further requests of this store and of those below it fail at once: ranks that
    are in several steps end each of them with requests, and would wait for each.

    Args:
        store: store for requests; None if `connect` opens it too, before the first request.
        connect: opens a connection to the same keys; called on the threads of this store.
        request_timeout_seconds: seconds that a response may take.
        name: see `Connection.name`.
    """

    def __init__(
        self,
        store: Store | None,
        connect: Callable[[], Store],
        *,
        request_timeout_seconds: float,
        name: str = "",
    ) -> None:
        self.name = name
        self._store: Any = store  # torch's type annotations lack bytes
        self._connect = connect
        self._request_timeout_seconds = request_timeout_seconds
        self._worker = Worker()
        self._idle: list[_WaitingConnection] = []
        self._losses: list[str] = []
        """Reasons why the host is given up, shared with the stores below."""

    def set(self, key: str, value: bytes) -> None:
        """Sets `key` to `value`, replacing any previous value."""
        self._request(lambda: self._store.set(key, value))

    def set_first(self, key: str, value: bytes) -> bytes:
        """Sets `key` to `value` unless the key exists. Returns the value that the key has then."""
        return bytes(self._request(lambda: self._store.compare_set(key, b"", value)))

    def get(self, key: str) -> bytes:
        """Returns the value of an existing key."""
        return self._value(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """Returns the values of keys that all exist."""
        if not self.has(keys):  # torch's `multi_get` would wait for them
            missing = next((key for key in keys if not self.has([key])), keys[0])
            raise _missing_key(missing)
        return list(self._request(lambda: self._store.multi_get(list(keys))))

    def has(self, keys: Sequence[str]) -> bool:
        """True if all of these keys exist."""
        return bool(self._request(lambda: self._store.check(list(keys))))

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter that starts at zero. Returns the sum."""
        try:
            return int(self._request(lambda: self._store.add(key, amount)))
        except StoreUnreachable:
            # The server closes the connection of a client that adds to a value that is no number. A new connection
            # shows the value, unless the host is lost.
            self._reconnect()
            if self.has([key]) and not _is_number(self._value(key)):
                raise StoreTampered(f"{key!r} must be a number, but is something else") from None
            raise

    def delete(self, key: str) -> None:
        """Deletes `key`, if it exists."""
        self._request(lambda: self._store.delete_key(key))

    def watch(self, key: str) -> KeyWatch:
        """Creates a watch that fires when `key` exists. At the end of the program, it costs the store requests."""
        waiter = self._idle.pop() if self._idle else _WaitingConnection(Worker(), [])
        if not waiter.worker.has_thread():
            return PolledKeyWatch(self, key)
        connect, idle = self._connect, self._idle

        def wait() -> None:
            if not waiter.connections:
                waiter.connections.append(connect())
            _wait_for(key, waiter.connections[0])
            # Only once the wait has returned: a connection whose wait has failed, or never ends, can carry no other
            # one.
            idle.append(waiter)

        return FutureKeyWatch(waiter.worker.submit(wait))

    def below(self, name: str) -> "TimeoutStore":
        """Opens a store of the keys below `name`, with connections and threads of its own."""
        connect = partial(_connect_below, self._connect, name)
        store = TimeoutStore(
            None, connect, request_timeout_seconds=self._request_timeout_seconds, name=f"{self.name}/{name}"
        )
        store._losses = self._losses
        store._reconnect()
        return store

    def _reconnect(self) -> None:
        try:
            self._store = self._request(self._connect)
        except StoreUnreachable as error:
            self._losses.append(str(error))
            raise

    def _value(self, key: str) -> bytes:
        # torch's `get` would wait for a missing key.
        value = bytes(self._request(lambda: self._store.compare_set(key, _NOTHING, _NOTHING)))
        if value == _NOTHING:
            raise _missing_key(key)
        return value

    def _request(self, call: Callable[[], Any]) -> Any:
        if self._losses:
            raise StoreUnreachable(self._losses[0])
        try:
            is_file = isinstance(_base(self._store), FileStore)
            own_call = partial(_without_soft_limit, call) if is_file else call
            return self._result_of(self._worker.submit(own_call))
        except TimeoutError:
            has_ended = self.has_host_ended()
            msg = "its process has ended" if has_ended else f"no answer for {self._request_timeout_seconds:g} s"
            self._losses.append(msg)
            raise StoreUnreachable(msg) from None
        except RuntimeError as error:
            raise _unreachable(error) from None

    def _result_of(self, future: Future[Any]) -> Any:
        """Waits for an answer, which does not come any more once the process of the host has ended."""
        deadline = time.monotonic() + self._request_timeout_seconds
        while True:
            left = deadline - time.monotonic()
            try:
                return future.result(max(0.0, min(left, _SLICE_SECONDS)))
            except TimeoutError:
                if left <= _SLICE_SECONDS or self.has_host_ended():
                    raise


class FutureKeyWatch:
    """Watch that fires when a thread returns from its wait."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def has_fired(self) -> bool:
        """True if the key has existed at some time since the watch was created."""
        if not self._future.done():
            return False
        error = self._future.exception()
        if error is not None:
            raise _unreachable(error) from None
        return True

    def wait(self, seconds: float) -> bool:
        """Waits until the watch fires, for at most `seconds`. Returns the value of `has_fired` then."""
        try:
            self._future.exception(seconds)
        except TimeoutError:
            return False
        return self.has_fired()


class PolledKeyWatch:
    """Watch that asks for its key, where no thread can wait: from Python 3.12 on, none starts when a program ends."""

    def __init__(self, store: TimeoutStore, key: str) -> None:
        self._store, self._key = store, key
        self._has_fired = False

    def has_fired(self) -> bool:
        """True if the key was there when this was asked."""
        self._has_fired = self._has_fired or self._store.has([self._key])
        return self._has_fired

    def wait(self, seconds: float) -> bool:
        """Waits until the watch fires, for at most `seconds`. Returns the value of `has_fired` then."""
        end = time.monotonic() + seconds
        while not self.has_fired() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return self._has_fired


def connect_to(host: str, port: int, *, timeout_seconds: float) -> TCPStore:
    """Opens a new connection to the TCPStore at `host` and `port`."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))


def share_store(store: Store, prefix: str, *, timeout_seconds: float) -> TimeoutStore:
    """Returns a store of the keys below `prefix`, for a group with this timeout. Drops any prefix of `store` itself."""
    base = _base(store)
    # An idle watchdog checks that another is active after half of the timeout; the other half is for the response.
    request_timeout_seconds = timeout_seconds / 2
    connect = partial(_connect_again, base, prefix, min(request_timeout_seconds, _MOST_CONNECT_SECONDS))
    return TimeoutStore(
        PrefixStore(prefix, base), connect, request_timeout_seconds=request_timeout_seconds, name=prefix
    )


def _base(store: Any) -> Any:
    """The store below all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _without_soft_limit(call: Callable[[], Any]) -> Any:
    """Makes a request to a store in a file, which the soft limit of the size of files must not keep from its end.

    A rank that has met the limit in a file of its own tells the others through the store.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == hard:
        return call()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _connect_again(base: Store, prefix: str, timeout_seconds: float) -> Store:
    if isinstance(base, TCPStore):
        _check_not_refused(base.host, base.port, min(timeout_seconds, _PROBE_SECONDS))
        base = connect_to(base.host, base.port, timeout_seconds=timeout_seconds)
    return PrefixStore(prefix, base)


def _check_not_refused(host: str, port: int, timeout_seconds: float) -> None:
    """Raises an error if nothing listens at an address any more, for which torch would wait as for a late start."""
    try:
        socket.create_connection((host, port), timeout_seconds).close()
    except ConnectionRefusedError as error:
        raise RuntimeError(f"nothing listens at {host}:{port}: {error}") from None
    except OSError:  # perhaps only late: torch has its own wait
        pass


def _connect_below(connect: Callable[[], Store], name: str) -> Store:
    return PrefixStore(name, connect())


def _wait_for(key: str, connection: Store) -> None:
    while True:
        began = time.monotonic()
        try:
            connection.wait([key], timedelta(seconds=_WAIT_SECONDS))
        except RuntimeError:
            # Not all stores raise a distinct type of error on a timeout.
            if time.monotonic() - began < _WAIT_SECONDS:
                raise
        else:
            return


def _missing_key(key: str) -> StoreTampered:
    return StoreTampered(f"{key!r} must be there, but is gone")


def _is_number(value: bytes) -> bool:
    return value.removeprefix(b"-").isdigit() and len(value) < 20


def _unreachable(error: BaseException) -> StoreClosed:
    message = str(error).partition("\n")[0]
    return StoreClosed(f"{type(error).__name__}: {message}")
