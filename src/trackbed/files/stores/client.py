"""Requests to object stores: every answer is compared with what was asked for, and every call ends in time.

Shapes: R ranges of one object.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, NamedTuple, TypeVar

from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores.address import Address
from trackbed.files.stores.event_loop import run_until

__all__ = ["ObjectStamp", "fetch_ranges", "stamp_of_object"]

_Result = TypeVar("_Result")
_DEFAULT_SECONDS: Final = 60.0
_ATTEMPTS_IN_TIME: Final = 4
"""Attempts that the time of a call is enough for, if each stalls."""
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 5.0
_MOST_IN_FLIGHT: Final = 64
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_FINAL: Final = ("status code: 400", "status code: 401", "status code: 403", "status code: 404", "status code: 416")


class ObjectStamp(NamedTuple):
    """Identity of an object: another object under the same address has another one."""

    size_bytes: int
    tag: str
    """`ETag`, or `Last-Modified` and size where there is no strong one."""


class _WrongAnswerError(Exception):
    """An answer is not what was asked for."""


def timeout_seconds() -> float:
    """Returns the seconds that a call may take: `TRACKBED_STORE_TIMEOUT`, or 60.

    Raises:
        ArgumentError: the variable is not a number above 0.
    """
    found = os.environ.get("TRACKBED_STORE_TIMEOUT", "")
    try:
        seconds = float(found) if found else _DEFAULT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        msg = f"TRACKBED_STORE_TIMEOUT must be a number of seconds above 0, found {found!r}"
        raise ArgumentError(msg)
    return seconds


def stamp_of_object(address: Address) -> ObjectStamp:
    """Returns size and tag of an object.

    Raises:
        FileNotFoundError: there is none.
        StoreError: the store refuses, gives no tag, or does not answer in time.
    """
    deadline = time.monotonic() + timeout_seconds()
    store, library = _open_store(address), _library(address)

    async def ask() -> ObjectStamp:
        return _stamp(await library.head_async(store, address.key), address)

    return run_until(deadline, _in_time(ask, address, deadline), where=address.text)


def fetch_ranges(address: Address, stamp: ObjectStamp, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Returns `[R]` bytes of ranges of an object, fetched together.

    Args:
        address: the object.
        stamp: its identity; another object under the address is an error.
        ranges: `[R]` first byte and the one after the last, each inside the object.

    Raises:
        StoreError: the object was replaced or removed, the store refuses, or it does not answer in time.
    """
    deadline = time.monotonic() + timeout_seconds()
    store, library = _open_store(address), _library(address)
    gate = asyncio.Semaphore(_MOST_IN_FLIGHT)

    async def fetch(start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        async with gate:
            return await _in_time(lambda: _range(library, store, address, stamp, start, stop), address, deadline)

    async def fetch_all() -> list[bytes]:
        return await asyncio.gather(*(fetch(*one) for one in ranges))

    return run_until(deadline, fetch_all(), where=address.text)


async def _range(library: Any, store: Any, address: Address, stamp: ObjectStamp, start: int, stop: int) -> bytes:
    """Fetches one range once, and compares the answer with the request."""
    options = {"range": (start, stop), **({"if_match": stamp.tag} if stamp.tag.startswith('"') else {})}
    answer = await library.get_async(store, address.key, options=options)
    found = _stamp(answer.meta, address)
    if found != stamp:
        msg = f"{address.text}: the object must be the one that was opened, found another one in its place"
        raise StoreError(msg)
    raw = bytes(await answer.bytes_async())
    if tuple(answer.range) != (start, stop) or len(raw) != stop - start:
        msg = f"bytes [{start}, {stop}) were asked for, and {len(raw)} bytes of {tuple(answer.range)} came"
        raise _WrongAnswerError(msg)
    return raw


async def _in_time(request: Callable[[], Awaitable[_Result]], address: Address, deadline: float) -> _Result:
    """Makes a request, again if it fails in a way that may pass: a server that is busy, a connection that is lost."""
    pause, seconds = _FIRST_PAUSE, timeout_seconds() / _ATTEMPTS_IN_TIME
    while True:
        try:
            return await asyncio.wait_for(request(), seconds)
        except (StoreError, ArgumentError):
            raise
        except Exception as error:
            error = _final(error, address)
            if isinstance(error, (StoreError, FileNotFoundError)):
                raise error from None
            pause = min(2 * pause, _LONGEST_PAUSE)
            wait = pause * random.uniform(0.5, 1)
            if time.monotonic() + wait >= deadline:
                msg = f"{address.text}: the store must answer in time, found: {_short(error)}"
                raise StoreError(msg) from error
            await asyncio.sleep(wait)


def _final(error: Exception, address: Address) -> Exception:
    """Returns an error that a further attempt would not change as ours; others as they are."""
    text = _short(error)
    name = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(2, "there is no such object", address.text)
    if name == "PreconditionError":
        return StoreError(f"{address.text}: the object must be the one that was opened, found another one in its place")
    if name in ("PermissionDeniedError", "UnauthenticatedError") or any(code in text for code in _FINAL):
        return StoreError(f"{address.text}: the store must give the object, found: {text}")
    return error


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _stamp(meta: Any, address: Address) -> ObjectStamp:
    tag = meta.get("e_tag")
    if tag is None or tag.startswith("W/"):
        changed = meta.get("last_modified")
        if changed is None:
            msg = f"{address.text}: the server must give an ETag or Last-Modified, found neither"
            raise StoreError(msg)
        tag = f"{changed.timestamp():.0f}-{meta['size']}"
    return ObjectStamp(int(meta["size"]), str(tag))


def _library(address: Address) -> Any:
    """Returns obstore.

    Raises:
        ArgumentError: it is not installed.
    """
    try:
        return import_module("obstore")
    except ImportError as error:
        msg = f"{address.text}: obstore must be installed to read from object stores: pip install 'trackbed[s3]'"
        raise ArgumentError(msg) from error


def _open_store(address: Address) -> Any:
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    return _store(_library(address), address.root, endpoint, timeout_seconds())


@lru_cache(maxsize=256)
def _store(library: Any, root: str, endpoint: str, seconds: float) -> Any:
    """Returns the client of a bucket; its requests are not repeated by the library, whose limits are not ours."""
    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=seconds / _ATTEMPTS_IN_TIME),
            "allow_http": root.startswith("http://") or endpoint.startswith("http://"),
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=seconds)},
    }
    if root.startswith("file:"):
        return library.store.from_url("file:///")
    if root.startswith("s3:") and endpoint:
        options["endpoint"] = endpoint
    return library.store.from_url(root, **options)
