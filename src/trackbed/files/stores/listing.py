"""Listing the objects below a folder address."""

import time
from collections.abc import AsyncIterator, Iterator
from itertools import chain, pairwise
from typing import Final

from trackbed.errors import ArgumentError, StoreError
from trackbed.files.stores import helper_process
from trackbed.files.stores.address import Address
from trackbed.files.stores.bucket import Bucket
from trackbed.files.stores.event_loop import run_until
from trackbed.files.stores.forked import is_forked
from trackbed.files.stores.open_bucket import open_bucket
from trackbed.files.stores.retries import retry_until, timeout_seconds

__all__ = ["list_objects", "list_pages"]

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
        msg = f"{folder.text}: a listed address must be of a store that has listings, found {folder.scheme}"
        raise ArgumentError(msg)
    return chain.from_iterable(list_pages(folder))


def list_pages(folder: Address) -> Iterator[list[tuple[str, int]]]:
    """Returns the pages of a listing; see `list_objects`."""
    return helper_process.list_pages(folder) if is_forked() else _own_pages(folder, open_bucket(folder))


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
            self._pages = None
            if self._last and not self._is_sorted:
                msg = f"{self._folder.text}: a listing that is not sorted must end without a failure, found one"
                raise StoreError(msg) from None
            raise
        if page:
            keys = [self._last, *(key for key, _ in page)]
            self._is_sorted = self._is_sorted and all(a < b for a, b in pairwise(keys))
            self._last = keys[-1]
        return page
