"""Writing objects: each appears whole, or not at all."""

import asyncio
import bisect
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from trackbed.cancellation import polling
from trackbed.errors import ArgumentError, StoreError
from trackbed.files.regular import open_regular
from trackbed.files.stores import forked_requests
from trackbed.files.stores.address import Address, ObjectVersion
from trackbed.files.stores.bucket import WritableBucket
from trackbed.files.stores.forked_requests import is_forked
from trackbed.files.stores.open_bucket import check_writable, open_writable_bucket
from trackbed.files.stores.requests import OutOfTimeError, make_once, retry_until, run_until
from trackbed.files.stores.time_limit import timeout_seconds

if TYPE_CHECKING:
    from typing_extensions import Buffer


_Result = TypeVar("_Result")
_LARGE_BYTES: Final = 512 << 20
"""Bytes from which on buffers are written in parts."""
_PART_BYTES: Final = 16 << 20
_LARGE_PART_BYTES: Final = 64 << 20
_MOST_DELETED: Final = 1000
"""Objects that one request of S3 can remove."""
_LISTINGS_IN_FLIGHT: Final = 64
_MOST_COMPARED: Final = 64 << 20
"""Bytes of an object that a conditional write may have."""
_MOST_PARTS: Final = 10_000
"""Parts that an object of S3 can have."""


def put_bytes(address: Address, raw: "Buffer") -> None:
    """Writes an object, in the place of one that is there, by one request.

    Args:
        address: the object, of scheme `s3`, `gs`, `az` or `file`.
        raw: its bytes.

    Raises:
        ArgumentError: the scheme is read only.
        StoreError: the store refuses, or does not answer within `TRACKBED_STORE_TIMEOUT` seconds.
    """
    check_writable(address)
    if is_forked():
        forked_requests.call("put_bytes", address, bytes(raw))
        return
    bucket = open_writable_bucket(address)
    _run_once(address, partial(bucket.put, address, raw))


def put_if_absent(address: Address, raw: "Buffer") -> bool:
    """Writes an object, unless there is one, by one conditional request.

    The store may have written the object although its answer was lost. A further attempt then finds it, so the caller
    must compare the object if the result is False.

    Args:
        address: the object, of scheme `s3`, `gs`, `az` or `file`.
        raw: its bytes.

    Returns:
        False if there is an object.

    Raises:
        ArgumentError: the scheme is read only.
        StoreError: the store refuses, or does not answer within `TRACKBED_STORE_TIMEOUT` seconds.
    """
    check_writable(address)
    if is_forked():
        return bool(forked_requests.call("put_if_absent", address, bytes(raw)))
    bucket = open_writable_bucket(address)
    return _run_once(address, partial(bucket.put_new, address, raw))


def put_buffers(address: Address, buffers: Sequence["Buffer"]) -> None:
    """Writes an object of the bytes of several buffers, in the place of one that is there.

    Up to 512 MiB are written by one request, and not copied: the buffers must stay as they are until this returns. More
    are written in parts of 64 MiB, of which four are copied at a time; see `put_file` for what may be left of them.

    Args:
        address: the object, of scheme `s3`, `gs`, `az` or `file`.
        buffers: its bytes.

    Raises:
        ArgumentError: the scheme is read only.
        StoreError: the store refuses, or does not answer within `TRACKBED_STORE_TIMEOUT` seconds; or no part passes
            within twice that time.
    """
    check_writable(address)
    if is_forked():
        forked_requests.call("put_buffers", address, [b"".join(buffers)])
        return
    bucket = open_writable_bucket(address)
    content = _Buffers(address, buffers)
    if content.num_bytes > _LARGE_BYTES:
        _put_parts(bucket, content, None)
    elif any(memoryview(buffer).nbytes for buffer in buffers):
        _run_once(address, partial(bucket.put_buffers, address, buffers))
    else:
        _run_once(address, partial(bucket.put, address, b""))  # of no pieces the library makes no object


def put_if(address: Address, raw: bytes, expected: ObjectVersion | None) -> ObjectVersion | None:
    """Writes an object by one conditional request: if the one that is there has a version, or if there is none.

    Args:
        address: the object, of scheme `s3`, `gs` or `az`.
        raw: its bytes, which no other write has: after a lost answer they tell whether it was this one.
        expected: version that is replaced; None if there must be no object.

    Returns:
        The new version; None if another one is there.

    Raises:
        ArgumentError: the scheme is read only.
        StoreError: the store refuses, or does not answer within `TRACKBED_STORE_TIMEOUT` seconds.
    """
    check_writable(address)
    if is_forked():
        found = forked_requests.call("put_if", address, raw, expected)
        return None if found is None else ObjectVersion(*found)
    bucket = open_writable_bucket(address)
    version = _run_once(address, partial(bucket.put_if, address, raw, expected))
    if version is None:
        # A request whose answer was lost is made again, and finds what it has written.
        with contextlib.suppress(FileNotFoundError):
            there, content = read_version(address, most_bytes=_MOST_COMPARED)
            return there if content == raw else None
    return version


def read_version(address: Address, *, most_bytes: int) -> tuple[ObjectVersion, bytes]:
    """Returns version and bytes of a small object that `put_if` may replace.

    Args:
        address: the object, of scheme `s3`, `gs` or `az`.
        most_bytes: its largest size.

    Raises:
        FileNotFoundError: there is none.
        StoreError: it is larger, the store refuses, or does not answer in time.
    """
    check_writable(address)
    if is_forked():
        version, raw = forked_requests.call("read_version", address, most_bytes)
        return ObjectVersion(*version), raw
    bucket = open_writable_bucket(address)
    found, content = _run_once(address, partial(bucket.get_whole, address, most_bytes))
    return found, bytes(content)


def list_folders(folders: Sequence[Address]) -> list[list[str]]:
    """Returns the names of the folders directly below each folder address, sorted, by a listing of each.

    Raises:
        ArgumentError: the scheme is read only.
        StoreError: the store refuses, or does not answer in time.
    """
    for folder in folders:
        check_writable(folder)
    if not folders:
        return []
    if is_forked():
        return list(forked_requests.call("list_folders", list(folders)))
    seconds = timeout_seconds()
    turns = asyncio.Semaphore(_LISTINGS_IN_FLIGHT)

    async def list_one(folder: Address) -> list[str]:
        request = partial(open_writable_bucket(folder).folders, folder)
        async with turns:
            found = await retry_until(time.monotonic() + seconds, request, folder)
        return sorted(key.rstrip("/").rpartition("/")[2] for key in found)

    async def list_all() -> list[list[str]]:
        return await asyncio.gather(*map(list_one, folders))

    return run_until(math.inf, list_all(), where=folders[0].text)


def delete_object(address: Address) -> None:
    """Removes an object, if there is one.

    Raises:
        ArgumentError: the scheme is read only.
        StoreError: the store refuses, or does not answer within `TRACKBED_STORE_TIMEOUT` seconds.
    """
    check_writable(address)
    if is_forked():
        forked_requests.call("delete_object", address)
        return
    bucket = open_writable_bucket(address)
    with contextlib.suppress(FileNotFoundError):
        _run_once(address, partial(bucket.delete, address))


def delete_objects(addresses: Iterable[Address]) -> None:
    """Removes objects of one bucket, those that are there, a thousand by one request where the store has that.

    Raises:
        ArgumentError: the scheme is read only.
        StoreError: the store refuses, or does not answer within `TRACKBED_STORE_TIMEOUT` seconds for a thousand.
    """
    found = list(addresses)
    for start in range(0, len(found), _MOST_DELETED):
        some = found[start : start + _MOST_DELETED]
        check_writable(some[0])
        if is_forked():
            forked_requests.call("delete_objects", some)
            continue
        bucket = open_writable_bucket(some[0])
        with contextlib.suppress(FileNotFoundError):
            _run_once(some[0], partial(bucket.delete_all, some))


def put_file(address: Address, path: str | Path, *, progress: Callable[[int], object] | None = None) -> None:
    """Writes an object from a file, in the place of one that is there.

    A file of up to 16 MiB is written by one request, a larger one in parts of 16 MiB, or of 64 MiB if it has more than
    10,000 of these: equal files have equal parts. Four parts are in flight together. If an upload is abandoned, the
    store keeps its parts until a lifecycle rule of the bucket removes them.

    Args:
        address: the object, of scheme `s3`, `gs`, `az` or `file`.
        path: the file, which must not change meanwhile.
        progress: called with the number of bytes that were handed to the store, at least each 50 ms.

    Raises:
        ArgumentError: the scheme is read only, or the file has more than 10,000 parts of 64 MiB.
        FormatError: `path` is no regular file.
        StoreError: the store refuses, no part passes within twice `TRACKBED_STORE_TIMEOUT` seconds, or the size of the
            file changes.
        OSError: the file cannot be read.
    """
    check_writable(address)
    if is_forked():
        forked_requests.put_file(address, path, progress)
        return
    bucket = open_writable_bucket(address)
    descriptor, size = open_regular(path)
    try:
        file = _OpenFile(address, path, descriptor, size)
        if size > _PART_BYTES:
            _put_parts(bucket, file, progress)
        else:
            raw = file.read(0)
            _run_once(address, partial(bucket.put, address, raw))
            if progress is not None:
                progress(size)
    finally:
        os.close(descriptor)


class _Buffers:
    """Buffers one behind the other, cut into parts."""

    def __init__(self, address: Address, buffers: Sequence["Buffer"]) -> None:
        self.address = address
        self.part_bytes = _LARGE_PART_BYTES
        views = [memoryview(buffer) for buffer in buffers]
        self._views = [view.cast("B") for view in views if view.nbytes]  # of no elements, none with axes can be cast
        self._ends = list(accumulate(map(len, self._views)))
        self.num_bytes = self._ends[-1] if self._ends else 0

    @property
    def starts(self) -> range:
        """First byte of each part."""
        return range(0, self.num_bytes, self.part_bytes)

    def read(self, start: int) -> bytes:
        """Returns the part that begins at `start`."""
        pieces, wanted = [], min(self.part_bytes, self.num_bytes - start)
        number = bisect.bisect_right(self._ends, start)
        while wanted:
            view = self._views[number]
            low = max(0, len(view) - (self._ends[number] - start))
            piece = view[low : low + wanted]
            pieces.append(piece)
            start, wanted, number = start + len(piece), wanted - len(piece), number + 1
        return b"".join(pieces)


class _OpenFile:
    """An open file, cut into parts.

    Args:
        address: where it is written to, for errors.
        path: its name, for errors.
        descriptor: open for reading.
        size: its size in bytes.

    Attributes:
        part_bytes: bytes of each part but the last.

    Raises:
        ArgumentError: the file has too many parts.
    """

    def __init__(self, address: Address, path: str | Path, descriptor: int, size: int) -> None:
        self.address = address
        self._path = path
        self._descriptor = descriptor
        self._size = size
        self.part_bytes = _PART_BYTES if size <= _MOST_PARTS * _PART_BYTES else _LARGE_PART_BYTES
        limit = _MOST_PARTS * self.part_bytes
        if size > limit:
            raise ArgumentError(
                f"{path}: a file must have at most {limit} bytes to be written to a store, found {size}"
            )

    @property
    def starts(self) -> range:
        """First byte of each part."""
        return range(0, self._size, self.part_bytes)

    def read(self, start: int) -> bytes:
        """Returns the part that begins at `start`."""
        wanted = min(self.part_bytes, self._size - start)
        raw = os.pread(self._descriptor, wanted, start)
        # A file that is replaced in place between two parts would give an object of both. Its size is what can be
        # compared at no cost.
        if len(raw) != wanted or os.fstat(self._descriptor).st_size != self._size:
            place = self.address.text
            raise StoreError(
                f"{self._path}: the file must keep its {self._size} bytes while it is written to {place}, found others"
            )
        return raw


def _put_parts(bucket: WritableBucket, file: _OpenFile | _Buffers, progress: Callable[[int], object] | None) -> None:
    """Writes an object in parts. A part is read when an earlier one has passed, so that the time begins anew."""
    seconds, done = timeout_seconds(), 0
    deadline = time.monotonic() + seconds

    async def parts() -> AsyncIterator[bytes]:
        nonlocal deadline, done
        for start in file.starts:
            # On a thread: a slow disk would hold up the event loop, and with it all other requests of this process.
            raw = await asyncio.to_thread(file.read, start)
            # The library asks for a part when an earlier one has passed. An upload that stalls asks for none, so its
            # time runs out; one that is slow, but goes on, has it anew with each part.
            deadline, done = time.monotonic() + 2 * seconds, start + len(raw)
            yield raw

    # Called by the thread that waits, while the event loop's thread sets the two numbers: each is replaced as a whole.
    def poll(_done: int) -> None:
        if time.monotonic() > deadline:
            raise OutOfTimeError(file.address.text, "no answer")
        if progress is not None:
            progress(done)

    request = partial(bucket.put_parts, file.address, parts(), file.part_bytes)
    with polling(poll):
        run_until(math.inf, make_once(request, file.address), where=file.address.text)
    if progress is not None:
        progress(done)


def _run_once(address: Address, request: Callable[[], Awaitable[_Result]]) -> _Result:
    deadline = time.monotonic() + timeout_seconds()
    return run_until(deadline, retry_until(deadline, request, address), where=address.text)
