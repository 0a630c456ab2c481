"""Requests by obstore."""

from collections.abc import AsyncIterator, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores.address import Address, ObjectRange, ObjectStamp, ObjectVersion, has_etag, stamp_of_metadata
from trackbed.files.stores.bucket import Answer
from trackbed.files.stores.requests import WrongAnswerError, is_forbidden, is_missing_object, is_out_of_range, replaced

if TYPE_CHECKING:
    from typing_extensions import Buffer


_PAGE: Final = 1000
"""Objects in one page of a listing."""
_PARTS_IN_FLIGHT: Final = 4


class ObstoreBucket:
    """A bucket of `s3`, `gs` or `az`, a host of `http(s)`, or the files of this machine.

    Args:
        library: obstore.
        store: its store for the bucket, which must not repeat requests by itself.
        open_uploads: opens its store for uploads, which repeats the requests of a part by itself.
    """

    is_conditional = True

    def __init__(self, library: Any, store: Any, open_uploads: Callable[[], Any]) -> None:
        self._library = library
        self._store = store
        self._open_uploads = open_uploads

    @cached_property
    def _uploads(self) -> Any:
        return self._open_uploads()

    async def head(self, address: Address) -> ObjectStamp:
        """Returns the stamp of an object."""
        try:
            metadata = await self._library.head_async(self._store, _key(address))
        except Exception as error:
            if not is_forbidden(error):
                raise
            # An answer to HEAD has no body. That of GET says why: expired, wrongly signed, or not allowed.
            options = {"range": (0, 1)}
            await self._library.get_async(self._store, _key(address), options=options)
            raise
        return stamp_of_metadata(metadata, address)

    async def get(self, wanted: ObjectRange) -> memoryview:
        """Returns a range that is not empty."""
        address, stamp, start, stop = wanted
        condition = {"if_match": stamp.tag} if has_etag(stamp) else {}
        options = {"range": (start, stop), **condition}
        answer = await self._library.get_async(self._store, _key(address), options=options)
        if stamp_of_metadata(answer.meta, address) != stamp:
            raise replaced(address)
        return await _body(answer, start, stop)

    async def get_first(self, address: Address, num_bytes: int) -> Answer:
        """Returns the first bytes of an object, fewer if it is shorter."""
        try:
            options = {"range": (0, num_bytes)}
            answer = await self._library.get_async(self._store, _key(address), options=options)
        except Exception as error:
            if not is_out_of_range(error):
                raise
            return await self._empty(address)
        stamp = stamp_of_metadata(answer.meta, address)
        return Answer(stamp, await _body(answer, 0, min(num_bytes, stamp.size_bytes)))

    async def _empty(self, address: Address) -> Answer:
        stamp = await self.head(address)
        if stamp.size_bytes:
            raise WrongAnswerError(f"the store says that an object of {stamp.size_bytes} bytes has no first byte")
        return Answer(stamp, memoryview(b""))

    async def pages(self, address: Address, after: str) -> AsyncIterator[list[tuple[str, int]]]:
        """Yields keys and sizes of the objects below a folder address, those after a key."""
        stream = self._library.list(self._store, address.key or None, offset=after or None, chunk_size=_PAGE)
        async for page in stream:
            yield [(str(found["path"]), int(found["size"])) for found in page]

    async def put(self, address: Address, raw: "Buffer") -> None:
        """Writes an object, in the place of one that is there."""
        await self._library.put_async(self._uploads, _key(address), raw, use_multipart=False)

    async def put_new(self, address: Address, raw: "Buffer") -> bool:
        """Writes an object, and returns True, unless there is one."""
        try:
            await self._library.put_async(self._uploads, _key(address), raw, mode="create", use_multipart=False)
        except self._library.exceptions.AlreadyExistsError:
            return False
        return True

    async def put_buffers(self, address: Address, buffers: Sequence["Buffer"]) -> None:
        """Writes an object of the bytes of several buffers, without a copy, in the place of one that is there."""
        # An iterator of pieces becomes one request; each attempt needs its own.
        await self._library.put_async(self._uploads, _key(address), iter(buffers), use_multipart=False)

    async def put_if(self, address: Address, raw: "Buffer", expected: ObjectVersion | None) -> ObjectVersion | None:
        """Writes an object if the one that is there has a version, or for None if there is none."""
        modes: list[Any] = ["create"] if expected is None else [_update_of(expected)]
        if expected is not None and address.scheme == "s3":
            # Older versions of radosgw compare the tag with its quotes to one without.
            modes.append(_update_of(expected._replace(tag=expected.tag.strip('"'))))
        exceptions = self._library.exceptions
        for mode in modes:
            try:
                found = await self._library.put_async(self._store, _key(address), raw, mode=mode, use_multipart=False)
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
                continue
            except FileNotFoundError as error:
                if not is_missing_object(error):
                    raise
                continue
            return _version_of(found, address)
        return None

    async def get_whole(self, address: Address, most_bytes: int) -> tuple[ObjectVersion, memoryview]:
        """Returns version and bytes of a small object."""
        answer = await self._library.get_async(self._store, _key(address))
        size = int(answer.meta["size"])
        if size > most_bytes:
            raise StoreError(f"{address.text}: the object must have at most {most_bytes} bytes, found {size}")
        return _version_of(answer.meta, address), await _body(answer, 0, size)

    async def folders(self, address: Address) -> list[str]:
        """Returns the keys of the folders directly below a folder address."""
        found = await self._library.list_with_delimiter_async(self._store, address.key or None)
        return [str(prefix) for prefix in found["common_prefixes"]]

    async def put_parts(self, address: Address, parts: AsyncIterator[bytes], part_bytes: int) -> None:
        """Writes an object of parts that have `part_bytes` bytes each, the last one at most."""
        options = {"use_multipart": True, "chunk_size": part_bytes, "max_concurrency": _PARTS_IN_FLIGHT}
        await self._library.put_async(self._uploads, _key(address), parts, **options)

    async def delete_all(self, addresses: Sequence[Address]) -> None:
        """Removes objects of this bucket, many by one request."""
        await self._library.delete_async(self._store, list(map(_key, addresses)))

    async def delete(self, address: Address) -> None:
        """Removes an object. It may raise FileNotFoundError if there is none."""
        await self._library.delete_async(self._store, _key(address))


async def _body(answer: Any, start: int, stop: int) -> memoryview:
    """Returns the bytes of an answer, compared in number and place with what was asked for."""
    raw = memoryview(await answer.bytes_async())
    if tuple(answer.range) != (start, stop) or len(raw) != stop - start:
        raise WrongAnswerError(
            f"bytes [{start}, {stop}) were asked for, and {len(raw)} bytes of {tuple(answer.range)} came"
        )
    return raw


def _version_of(metadata: Any, address: Address) -> ObjectVersion:
    if not metadata.get("e_tag"):
        raise StoreError(f"{address.text}: the server must give an ETag, found none")
    return ObjectVersion(str(metadata["e_tag"]), metadata.get("version"))


def _update_of(version: ObjectVersion) -> dict[str, str]:
    """The condition of a write."""
    return {"e_tag": version.tag} | ({} if version.number is None else {"version": version.number})


def _key(address: Address) -> str:
    """Returns the object's key. A key of an HTTP address is decoded, because obstore encodes it again."""
    key = unquote(address.key) if address.scheme in ("http", "https") else address.key
    if not key.strip("/"):
        raise ArgumentError(f"{address.text}: the address of an object must have a key, found none")
    return key
