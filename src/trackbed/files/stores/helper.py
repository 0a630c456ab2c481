"""The helper program of a forked process: makes its requests, in a process where obstore works.

It is started by `forked_requests.py`, answers each call on a thread, and ends when the forked process does.
"""

import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from trackbed.cancellation import polling
from trackbed.files.stores.address import Address, ObjectRange, ObjectStamp, ObjectVersion
from trackbed.files.stores.forked_requests import (
    FailureMessage,
    PageMessage,
    ProgressMessage,
    ResultMessage,
    is_readable,
    receive_call,
    send,
)
from trackbed.files.stores.reads import fetch, fetch_heads, fetch_to_file, list_pages, stamps_of_objects
from trackbed.files.stores.writes import (
    delete_object,
    delete_objects,
    list_folders,
    put_buffers,
    put_bytes,
    put_file,
    put_if,
    put_if_absent,
    read_version,
)


class _CallerGoneError(Exception):
    """The caller has closed its end of the call."""


def main() -> None:
    """Answers calls until the other end of the standard input is closed."""
    control = socket.socket(fileno=0)
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            os._exit(0)  # with all threads, whose results are not needed
        # A thread for each call: a call that waits for its store must not keep those of other threads of the caller
        # waiting.
        connection = socket.socket(fileno=descriptors[0])
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    """Answers one call."""
    with connection:
        try:
            call, descriptor = receive_call(connection)
            try:
                # A caller that was interrupted closes its end. The poll notices that also while a request is under way;
                # otherwise its bytes would still be fetched, and fill memory that nobody reads.
                with polling(partial(_check_caller, connection)):
                    answer: Any = ResultMessage(_FUNCTIONS[call.function](connection, descriptor, *call.arguments))
            except (_CallerGoneError, ConnectionError):
                return
            # Every error must arrive: without an answer, the caller would report that the helper has ended.
            except Exception as error:  # noqa: BLE001 - it is raised in the process that waits
                answer = FailureMessage(error)
            finally:
                if descriptor is not None:
                    os.close(descriptor)
            send(connection, answer)
        except (EOFError, ConnectionError):
            return


def _check_caller(connection: socket.socket, _done: int) -> None:
    """Looks whether the caller still waits. It sends nothing after its call, so that only an end can be read."""
    if is_readable(connection, 0):
        raise _CallerGoneError


def _fetch(_: socket.socket, descriptor: int, ranges: Sequence[ObjectRange], in_flight: int) -> None:
    """Fetches ranges into the shared memory, one behind the other."""
    found = fetch(ranges, in_flight=in_flight)
    with mmap.mmap(descriptor, 0) as area:
        offset = 0
        for raw in found:
            area[offset : offset + len(raw)] = raw
            offset += len(raw)


def _fetch_heads(
    _: socket.socket, descriptor: int, addresses: Sequence[Address], num_bytes: int, in_flight: int
) -> list[tuple[ObjectStamp, int] | Exception]:
    """Fetches the first bytes of objects into the shared memory, at multiples of `num_bytes`."""
    found = fetch_heads(addresses, num_bytes, in_flight=in_flight)
    results: list[tuple[ObjectStamp, int] | Exception] = []
    with mmap.mmap(descriptor, 0) as area:
        for number, one in enumerate(found):
            if isinstance(one, Exception):
                results.append(one)
            else:
                stamp, raw = one
                area[number * num_bytes : number * num_bytes + len(raw)] = raw
                results.append((stamp, len(raw)))
    return results


def _stamps(
    _: socket.socket, __: int | None, addresses: Sequence[Address], in_flight: int
) -> list[ObjectStamp | Exception]:
    return stamps_of_objects(addresses, in_flight=in_flight)


def _fetch_to_file(connection: socket.socket, descriptor: int, address: Address, stamp: ObjectStamp) -> None:
    fetch_to_file(address, stamp, descriptor, progress=partial(_report, connection))


def _put_file(connection: socket.socket, _: int | None, address: Address, path: str) -> None:
    put_file(address, path, progress=partial(_report, connection))


def _report(connection: socket.socket, done: int) -> None:
    send(connection, ProgressMessage(done))


def _list(connection: socket.socket, _: int | None, folder: Address) -> None:
    for page in list_pages(folder):
        send(connection, PageMessage(page))


def _read_version(address: Address, most_bytes: int) -> tuple[ObjectVersion, bytes]:
    return read_version(address, most_bytes=most_bytes)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that needs neither connection nor file."""

    def call(_: socket.socket, __: int | None, *arguments: Any) -> Any:
        return function(*arguments)

    return call


_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "delete_object": _plain(delete_object),
    "delete_objects": _plain(delete_objects),
    "fetch": _fetch,
    "fetch_heads": _fetch_heads,
    "fetch_to_file": _fetch_to_file,
    "list_pages": _list,
    "list_folders": _plain(list_folders),
    "put_buffers": _plain(put_buffers),
    "put_bytes": _plain(put_bytes),
    "put_file": _put_file,
    "put_if": _plain(put_if),
    "put_if_absent": _plain(put_if_absent),
    "read_version": _plain(_read_version),
    "stamps_of_objects": _stamps,
}
