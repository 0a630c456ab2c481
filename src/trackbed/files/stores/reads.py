"""Reading and listing objects: every answer is compared with the request, and every call ends in time.

Shapes: R ranges, N objects.
"""

import asyncio
import math
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, pairwise
from typing import Final, TypeVar

from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores import forked_requests
from trackbed.files.stores.address import Address, ObjectRange, ObjectStamp
from trackbed.files.stores.bucket import Answer, Bucket
from trackbed.files.stores.forked_requests import is_forked
from trackbed.files.stores.open_bucket import open_bucket
from trackbed.files.stores.requests import OutOfTimeError, replaced, result_by, retry_until, run_until, submit
from trackbed.files.stores.time_limit import timeout_seconds

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_MOST_IN_FLIGHT: Final = 64
_PART_BYTES: Final = 16 << 20
_PARTS_IN_FLIGHT: Final = 4
"""Parts of a whole object: 64 MiB together."""


def fetch(ranges: Sequence[ObjectRange], *, in_flight: int = _MOST_IN_FLIGHT) -> list[memoryview]:
    """Fetches ranges of any number of objects.

    The call takes `TRACKBED_STORE_TIMEOUT` seconds (60) at most. The first error ends it.

    Args:
        ranges: `[R]` ranges, each within its object.
        in_flight: requests at the same time, at least 1.

    Returns:
        `[R]` bytes of each range, read-only.

    Raises:
        ArgumentError: a range is not within its object, or `in_flight` is below 1.
        FileNotFoundError: an object was removed.
        StoreError: an object was replaced, a store refuses, or does not answer in time.
    """
    _check_in_flight(in_flight)
    for address, stamp, start, stop in ranges:
        if not 0 <= start <= stop <= stamp.size_bytes:
            raise ArgumentError(
                f"{address.text}: a range must be within [0, {stamp.size_bytes}), found [{start}, {stop})"
            )
    if is_forked():
        return forked_requests.fetch(ranges, in_flight)
    deadline = time.monotonic() + timeout_seconds()
    buckets = _buckets([one.address for one in ranges])
    results = [memoryview(b"")] * len(ranges)

    async def fetch_one(number: int) -> None:
        one = ranges[number]
        request = partial(buckets[one.address.root].get, one)
        results[number] = await retry_until(deadline, request, one.address)

    numbers = [number for number, one in enumerate(ranges) if one.start < one.stop]
    unguarded = list({one[:2]: one for one in ranges if not buckets[one.address.root].is_conditional}.values())

    async def check_one(one: ObjectRange) -> None:
        request = partial(buckets[one.address.root].head, one.address)
        if await retry_until(deadline, request, one.address) != one.stamp:
            raise replaced(one.address)

    async def fetch_all() -> None:
        # The reads of some buckets carry no condition: an object that is replaced between two of them would give bytes
        # of both. So its stamp must be the same before the first read and after the last.
        await _for_each(unguarded, check_one, in_flight)
        await _for_each(numbers, fetch_one, in_flight)
        await _for_each(unguarded, check_one, in_flight)

    if numbers:
        run_until(deadline, fetch_all(), where=ranges[numbers[0]].address.text)
    return results


def fetch_heads(
    addresses: Sequence[Address], num_bytes: int, *, in_flight: int = _MOST_IN_FLIGHT
) -> list[tuple[ObjectStamp, memoryview] | Exception]:
    """Fetches the first bytes of objects, and their stamps from the same answers.

    Each object has `TRACKBED_STORE_TIMEOUT` seconds from its first request on. When they were not enough for one,
    no request for a further object is made.

    Args:
        addresses: `[N]` objects.
        num_bytes: bytes of each, at least 1; a shorter object is read whole.
        in_flight: requests at the same time, at least 1.

    Returns:
        `[N]` stamp and first bytes of each object, or the error in its place: a `FileNotFoundError` if there is none, a
        `StoreError` if the store refuses or does not answer in time.

    Raises:
        ArgumentError: `num_bytes` or `in_flight` is below 1, or an address cannot be used.
    """
    if num_bytes < 1:
        raise ArgumentError(f"num_bytes must be at least 1, found {num_bytes}")
    _check_in_flight(in_flight)
    if is_forked():
        return forked_requests.fetch_heads(addresses, num_bytes, in_flight)

    async def first(bucket: Bucket, address: Address) -> Answer:
        return await bucket.get_first(address, num_bytes)

    found = _ask(addresses, first, in_flight)
    return [(one.stamp, one.raw) if isinstance(one, Answer) else one for one in found]


def stamps_of_objects(
    addresses: Sequence[Address], *, in_flight: int = _MOST_IN_FLIGHT
) -> list[ObjectStamp | Exception]:
    """Returns `[N]` stamps of objects, by one HEAD each, or errors in their places; see `fetch_heads`."""
    _check_in_flight(in_flight)
    if is_forked():
        return forked_requests.stamps_of_objects(addresses, in_flight)

    async def head(bucket: Bucket, address: Address) -> ObjectStamp:
        return await bucket.head(address)

    return _ask(addresses, head, in_flight)


def stamp_of_object(address: Address) -> ObjectStamp:
    """Returns size and tag of an object.

    Raises:
        FileNotFoundError: there is none.
        StoreError: the store refuses, gives no tag, or does not answer in time.
    """
    (found,) = stamps_of_objects([address])
    if isinstance(found, Exception):
        raise found
    return found


def read_object(address: Address, *, most_bytes: int) -> tuple[ObjectStamp, bytes]:
    """Returns the stamp and all bytes of a small object.

    Args:
        address: the object.
        most_bytes: its largest size, at least 1.

    Raises:
        FileNotFoundError: there is none.
        StoreError: it is larger, the store refuses, or does not answer in time.
    """
    (found,) = fetch_heads([address], most_bytes)
    if isinstance(found, Exception):
        raise found
    stamp, raw = found
    if stamp.size_bytes > most_bytes:
        raise StoreError(f"{address.text}: the object must have at most {most_bytes} bytes, found {stamp.size_bytes}")
    return stamp, bytes(raw)


def fetch_to_file(
    address: Address, stamp: ObjectStamp, descriptor: int, *, progress: Callable[[int], object] | None = None
) -> None:
    """Fetches a whole object into an open file, from its beginning on; 64 MiB are in memory at most.

    Each part of 16 MiB has `TRACKBED_STORE_TIMEOUT` seconds from its first request on.

    Args:
        address: the object.
        stamp: its identity; another object under the address is an error.
        descriptor: file that is open for writing; its position does not change.
        progress: called with the number of bytes that are written, after each part.

    Raises:
        FileNotFoundError: the object was removed.
        StoreError: it was replaced, the store refuses, or does not answer in time.
        OSError: the file cannot be written.
    """
    if is_forked():
        forked_requests.fetch_to_file(address, stamp, descriptor, progress)
        return
    bucket, seconds = open_bucket(address), timeout_seconds()
    starts = iter(range(0, stamp.size_bytes, _PART_BYTES))
    running: deque[tuple[int, float, Future[memoryview]]] = deque()

    def start_next() -> None:
        start = next(starts, None)
        if start is not None:
            part = ObjectRange(address, stamp, start, min(start + _PART_BYTES, stamp.size_bytes))
            deadline = time.monotonic() + seconds
            running.append((start, deadline, submit(retry_until(deadline, partial(bucket.get, part), address))))

    _check_unguarded(bucket, address, stamp)
    try:
        for _ in range(_PARTS_IN_FLIGHT):
            start_next()
        while running:
            start, deadline, future = running.popleft()
            raw = result_by(deadline, future, where=address.text)
            _write(descriptor, raw, start)
            done = start + len(raw)
            # The part is dropped before the next one is begun, or five would be in memory.
            del raw, future
            start_next()
            if progress is not None:
                progress(done)
    finally:
        # After an error, nobody takes the results of the other parts; they would be fetched all the same.
        for _, _, future in running:
            future.cancel()
    _check_unguarded(bucket, address, stamp)


def _check_unguarded(bucket: Bucket, address: Address, stamp: ObjectStamp) -> None:
    """Compares the stamp of an object, if the reads of its bucket do not."""
    if not bucket.is_conditional and stamp_of_object(address) != stamp:
        raise replaced(address)


def _write(descriptor: int, raw: memoryview, offset_bytes: int) -> None:
    while raw:
        written = os.pwrite(descriptor, raw, offset_bytes)
        raw, offset_bytes = raw[written:], offset_bytes + written


def _ask(
    addresses: Sequence[Address], request: Callable[[Bucket, Address], Awaitable[_Result]], in_flight: int
) -> list[_Result | Exception]:
    """Makes a request for each object; an error stands in the place of its result."""
    seconds, buckets = timeout_seconds(), _buckets(addresses)
    results: list[_Result | Exception] = [StoreError("no request was made")] * len(addresses)
    is_late = False

    async def ask_one(number: int) -> None:
        nonlocal is_late
        address, deadline = addresses[number], time.monotonic() + seconds
        if is_late:
            results[number] = OutOfTimeError(address.text, "no answer for another object")
            return
        try:
            results[number] = await retry_until(deadline, lambda: request(buckets[address.root], address), address)
        except (StoreError, FileNotFoundError, ArgumentError) as error:
            # A store that did not answer for one object in its whole time is down, or cannot be reached. Each of
            # thousands of objects would wait as long, one after the other.
            is_late = is_late or isinstance(error, OutOfTimeError)
            results[number] = error

    if addresses:
        run_until(math.inf, _for_each(range(len(addresses)), ask_one, in_flight), where=addresses[0].text)
    return results


def _check_in_flight(in_flight: int) -> None:
    if in_flight < 1:
        raise ArgumentError(f"in_flight must be at least 1, found {in_flight}")


def _buckets(addresses: Sequence[Address]) -> dict[str, Bucket]:
    """Returns the bucket of each root."""
    return {root: open_bucket(address) for root, address in {one.root: one for one in addresses}.items()}


async def _for_each(items: Sequence[_Item], work: Callable[[_Item], Awaitable[None]], in_flight: int) -> None:
    """Works on items, `in_flight` at the same time. The first error ends all work."""
    # All workers take from one iterator. They run on one event loop, and change only at an `await`, so no item is taken
    # twice.
    waiting = iter(items)

    async def take() -> None:
        for item in waiting:
            await work(item)

    workers = [asyncio.ensure_future(take()) for _ in range(min(in_flight, len(items)))]
    try:
        await asyncio.gather(*workers)
    finally:
        # `gather` raises the first error and lets the others go on: they would fill results that nobody reads.
        for worker in workers:
            worker.cancel()


_SORTED: Final = ("s3", "gs", "az")
"""Schemes whose listings are sorted by key, and can continue after one."""


def list_objects(folder: Address) -> Iterator[tuple[str, int]]:
    """Yields addresses and sizes of the objects below a folder address, in the order of the store.

    Pages of 1,000 objects are requested as they are needed; each has `TRACKBED_STORE_TIMEOUT` seconds.

    Args:
        folder: `s3://bucket/a` lists `a/b` and `a/b/c`, but not `ab`; an address without a key lists the whole bucket.

    Raises:
        ArgumentError: the scheme is `http` or `https`.
        StoreError: the store refuses, or does not answer in time.
    """
    if folder.scheme in ("http", "https"):
        raise ArgumentError(
            f"{folder.text}: a listed address must be of a store that has listings, found {folder.scheme}"
        )
    return chain.from_iterable(list_pages(folder))


def list_pages(folder: Address) -> Iterator[list[tuple[str, int]]]:
    """Returns the pages of a listing; see `list_objects`."""
    return forked_requests.list_pages(folder) if is_forked() else _own_pages(folder, open_bucket(folder))


def _own_pages(folder: Address, bucket: Bucket) -> Iterator[list[tuple[str, int]]]:
    root = "file:///" if folder.scheme == "file" else f"{folder.root}/"
    listing = _Listing(folder, bucket)
    while True:
        deadline = time.monotonic() + timeout_seconds()
        page = run_until(deadline, retry_until(deadline, listing.next_page, folder), where=folder.text)
        if page is None:
            return
        yield [(root + key, size) for key, size in page]


class _Listing:
    """The pages of a listing; after a failure it continues behind the last key.

    Args:
        folder: the address of the folder.
        bucket: its bucket.
    """

    def __init__(self, folder: Address, bucket: Bucket) -> None:
        self._folder = folder
        self._bucket = bucket
        self._pages: AsyncIterator[list[tuple[str, int]]] | None = None
        self._last = ""
        self._is_sorted = folder.scheme in _SORTED

    async def next_page(self) -> list[tuple[str, int]] | None:
        """Returns the next page, or None after the last one."""
        if self._pages is None:
            self._pages = self._bucket.pages(self._folder, self._last)
        try:
            page = await anext(self._pages, None)
        except Exception:
            # An iterator that has raised does not go on. A new one begins behind the last key, which is right only if
            # the store sorts its listing; otherwise some keys would be left out.
            self._pages = None
            if self._last and not self._is_sorted:
                raise StoreError(
                    f"{self._folder.text}: a listing that is not sorted must end without a failure, found one"
                ) from None
            raise
        if page:
            keys = [self._last, *(key for key, _ in page)]
            self._is_sorted = self._is_sorted and all(a < b for a, b in pairwise(keys))
            self._last = keys[-1]
        return page
