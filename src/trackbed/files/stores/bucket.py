"""Buckets: the requests that a library for object stores makes, each once, with the answer compared to the request."""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from trackbed.files.stores.address import Address
from trackbed.files.stores.stamp import ObjectRange, ObjectStamp

__all__ = ["Answer", "Bucket"]


class Answer(NamedTuple):
    """Bytes of an object."""

    stamp: ObjectStamp
    raw: memoryview


class Bucket(Protocol):
    """One attempt of each request; errors are those of the library, which `retry_until` tells apart."""

    async def head(self, address: Address) -> ObjectStamp:
        """Returns the stamp of an object."""

    async def get(self, wanted: ObjectRange) -> memoryview:
        """Returns a range that is not empty."""

    async def get_first(self, address: Address, num_bytes: int) -> Answer:
        """Returns the first bytes of an object, fewer if it is shorter."""

    def pages(self, address: Address, after: str) -> AsyncIterator[list[tuple[str, int]]]:
        """Yields keys and sizes of the objects below a folder address, those after a key."""
