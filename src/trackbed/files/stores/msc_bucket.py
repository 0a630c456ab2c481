"""Requests by multi-storage-client, whose reads carry no condition: `fetch` compares stamps before and after them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from itertools import islice
from typing import Any, Final, TypeVar

from trackbed.files.stores.address import Address
from trackbed.files.stores.bucket import Answer
from trackbed.files.stores.retries import WrongAnswerError
from trackbed.files.stores.stamp import ObjectRange, ObjectStamp, stamp_of_metadata

__all__ = ["MscBucket"]

_Result = TypeVar("_Result")
_PAGE: Final = 1000


class MscBucket:
    """A profile of multi-storage-client.

    Args:
        library: multistorageclient.
        client: its client for the profile.
    """

    is_conditional = False

    def __init__(self, library: Any, client: Any) -> None:
        self._library = library
        self._client = client

    async def head(self, address: Address) -> ObjectStamp:
        """Returns the stamp of an object."""
        found = await _on_thread(lambda: self._client.info(address.key))
        if found.type != "file":
            raise FileNotFoundError(address.key)
        fields = {"size": found.content_length, "e_tag": found.etag, "last_modified": found.last_modified}
        return stamp_of_metadata(fields, address)

    async def get(self, wanted: ObjectRange) -> memoryview:
        """Returns a range that is not empty."""
        return await self._read(wanted.address, wanted.start, wanted.stop)

    async def get_first(self, address: Address, num_bytes: int) -> Answer:
        """Returns the first bytes of an object, fewer if it is shorter."""
        stamp = await self.head(address)
        stop = min(num_bytes, stamp.size_bytes)
        raw = await self._read(address, 0, stop) if stop else memoryview(b"")
        if await self.head(address) != stamp:
            msg = "the object was replaced while it was read"
            raise WrongAnswerError(msg)
        return Answer(stamp, raw)

    async def pages(self, address: Address, after: str) -> AsyncIterator[list[tuple[str, int]]]:
        """Yields keys and sizes of the objects below a folder address, those after a key."""
        folder = f"{address.key.strip('/')}/" if address.key.strip("/") else ""
        found = iter(self._client.list_recursive(folder, start_after=after or None))
        while page := await _on_thread(lambda: list(islice(found, _PAGE))):
            yield [(one.key, one.content_length) for one in page if one.type == "file"]

    async def _read(self, address: Address, start: int, stop: int) -> memoryview:
        part = self._library.types.Range(start, stop - start)
        raw = await _on_thread(lambda: self._client.read(address.key, byte_range=part))
        if len(raw) != stop - start:
            msg = f"bytes [{start}, {stop}) were asked for, and {len(raw)} bytes came"
            raise WrongAnswerError(msg)
        return memoryview(raw).toreadonly()


async def _on_thread(function: Callable[[], _Result]) -> _Result:
    """Calls a blocking function on a thread of its own, for which nothing waits if the call is given up.

    A thread of a pool would be waited for when the program ends.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def finish(result: _Result | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type] # the result of `function`, which may be None
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            outcome: tuple[_Result | None, BaseException | None] = (function(), None)
        except BaseException as error:  # noqa: BLE001 - it is raised where the call is awaited
            outcome = (None, error)
        loop.call_soon_threadsafe(finish, *outcome)

    threading.Thread(target=run, name="trackbed-msc", daemon=True).start()
    return await future
