"""Buckets: the requests that a library for object stores makes, each once, with the answer compared to the request."""

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from trackbed.files.stores.address import Address, ObjectRange, ObjectStamp, ObjectVersion

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Answer(NamedTuple):
    """Bytes of an object."""

    stamp: ObjectStamp
    raw: memoryview


class Bucket(Protocol):
    """One attempt of each request; it raises the library's errors, which `retry_until` tells apart."""

    is_conditional: bool
    """True if `get` refuses an object with another stamp."""

    async def head(self, address: Address) -> ObjectStamp:
        """Returns the stamp of an object."""

    async def get(self, wanted: ObjectRange) -> memoryview:
        """Returns a range that is not empty."""

    async def get_first(self, address: Address, num_bytes: int) -> Answer:
        """Returns the first bytes of an object, fewer if it is shorter."""

    def pages(self, address: Address, after: str) -> AsyncIterator[list[tuple[str, int]]]:
        """Yields keys and sizes of the objects below a folder address, those after a key."""


class WritableBucket(Bucket, Protocol):
    """A bucket to which objects can be written. Each request is atomic: an object appears whole."""

    async def put(self, address: Address, raw: "Buffer") -> None:
        """Writes an object, in the place of one that is there."""

    async def put_new(self, address: Address, raw: "Buffer") -> bool:
        """Writes an object, and returns True, unless there is one."""

    async def put_buffers(self, address: Address, buffers: Sequence["Buffer"]) -> None:
        """Writes an object of the bytes of several buffers, without a copy, in the place of one that is there."""

    async def put_if(self, address: Address, raw: "Buffer", expected: ObjectVersion | None) -> ObjectVersion | None:
        """Writes an object if the one that is there has a version, or for None if there is none.

        Returns:
            The new version; None if another one is there.
        """

    async def get_whole(self, address: Address, most_bytes: int) -> tuple[ObjectVersion, memoryview]:
        """Returns version and bytes of a small object.

        Raises:
            WrongAnswerError: it has more than `most_bytes`.
        """

    async def folders(self, address: Address) -> list[str]:
        """Returns the keys of the folders directly below a folder address."""

    async def put_parts(self, address: Address, parts: AsyncIterator[bytes], part_bytes: int) -> None:
        """Writes an object of parts that have `part_bytes` bytes each, the last one at most."""

    async def delete_all(self, addresses: Sequence[Address]) -> None:
        """Removes objects of this bucket, many by one request. It may raise FileNotFoundError if one is not there."""

    async def delete(self, address: Address) -> None:
        """Removes an object. It may raise FileNotFoundError if there is none."""
