"""The bytes of `.bin` objects.

Shapes: M ranges of bytes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import FormatError
from trackbed.files import stores
from trackbed.files.stores import Address, ObjectRange, ObjectStamp, parse_address
from trackbed.tokens.stored.budget import BUDGET

_GAP_BYTES: Final = 4096
"""Bytes between two ranges that are fetched with them: less than another request costs."""
_GAP_SHARE: Final = 20
"""A larger gap is fetched, too, if the two ranges together have so many times its bytes."""
_MOST_BYTES: Final = 8 << 20
"""Bytes of one request; larger ranges take several, which are in flight together."""


class FetchedRange(NamedTuple):
    """Bytes of one of several objects."""

    number: int
    """Number of the object."""
    start: int
    """First byte in the object."""
    content: npt.NDArray[np.uint8]


class StoredSource:
    """An object. Reads return new arrays, and fail if it was replaced since it was opened.

    Args:
        address: the object.
        stamp: its identity.
    """

    def __init__(self, address: Address, stamp: ObjectStamp) -> None:
        self.address = address
        self.stamp = stamp

    @classmethod
    def open(cls, address: str) -> "StoredSource":
        """Opens the object at an address.

        Raises:
            FileNotFoundError: there is none.
            StoreError: the store does not answer.
        """
        parsed = parse_address(address)
        return cls(parsed, stores.stamp_of_object(parsed))

    def read(self, dtype: type[np.number[Any]], count: int, offset: int) -> npt.NDArray[np.number[Any]]:
        """`[count]` tokens from byte `offset` on, as a new array."""
        (tokens,) = read_spans(dtype, [(self, count, offset)])
        return tokens


def read_spans(
    dtype: type[np.number[Any]], spans: Sequence[tuple[StoredSource, int, int]]
) -> list[npt.NDArray[np.number[Any]]]:
    """Returns arrays of tokens, which are requested together; in parts, if they exceed the bytes of a read.

    Args:
        dtype: type of the tokens.
        spans: object, count and first byte of each array.
    """
    sources = list(dict.fromkeys(source for source, _, _ in spans))
    number_of = {source: number for number, source in enumerate(sources)}
    size = np.dtype(dtype).itemsize
    ranges = [(number_of[source], offset, offset + count * size) for source, count, offset in spans]
    for number, start, stop in ranges:
        if not 0 <= start <= stop <= sources[number].stamp.size_bytes:
            where = f"{sources[number].address.text}: a read of bytes [{start}, {stop}) must lie inside the file"
            raise FormatError(f"{where}, which has {sources[number].stamp.size_bytes}")
    joined = join_ranges(np.array(ranges, dtype=np.int64).reshape(-1, 3))
    size_bytes = int((joined[:, 2] - joined[:, 1]).sum())
    if size_bytes > BUDGET.half and len(spans) > 1:
        middle = len(spans) // 2
        return read_spans(dtype, spans[:middle]) + read_spans(dtype, spans[middle:])
    with BUDGET.held(size_bytes):
        found = fetch_ranges(sources, joined)
        return [_cut(found, *one).view(dtype) for one in ranges]


def _cut(found: Sequence[FetchedRange], number: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
    """Copies a range out of what was fetched, so that it keeps no more memory than its own."""
    if start == stop:
        return np.empty(0, dtype=np.uint8)
    one = found[bisect_right(found, (number, start), key=lambda piece: (piece.number, piece.start)) - 1]
    return one.content[start - one.start : stop - one.start].copy()


def join_ranges(ranges: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Joins ranges of bytes that overlap or are close to each other, in any order; leaves empty ones out.

    Args:
        ranges: `[M, 3]` number of the object, first byte and the one after the last.

    Returns:
        `[M', 3]` the joined ranges, sorted.

    >>> join_ranges(np.array([[0, 9000, 9010], [0, 5, 10], [0, 10, 20], [1, 20, 30]])).tolist()
    [[0, 5, 20], [0, 9000, 9010], [1, 20, 30]]
    """
    some = ranges[ranges[:, 2] > ranges[:, 1]]
    if len(some) < 2:
        return some
    some = some[np.lexsort((some[:, 1], some[:, 0]))]
    reach = np.empty(len(some), dtype=np.int64)  # the furthest end so far, of the same object
    first_of = np.flatnonzero(np.diff(some[:, 0], prepend=-1))
    for first, stop in zip(first_of, [*first_of[1:], len(some)], strict=True):
        np.maximum.accumulate(some[first:stop, 2], out=reach[first:stop])
    some = np.stack((some[:, 0], some[:, 1], reach), axis=1)
    while True:
        sizes = some[:, 2] - some[:, 1]
        gaps = some[1:, 1] - some[:-1, 2]
        begins = np.ones(len(some), dtype=bool)
        begins[1:] = (some[1:, 0] != some[:-1, 0]) | (
            (gaps > _GAP_BYTES) & (gaps * _GAP_SHARE > sizes[1:] + sizes[:-1])
        )
        starts = np.flatnonzero(begins)
        if len(starts) == len(some):
            return some
        some = np.stack((some[starts, 0], some[starts, 1], some[[*(starts[1:] - 1), len(some) - 1], 2]), axis=1)


def fetch_ranges(sources: Sequence[StoredSource], ranges: npt.NDArray[np.int64]) -> list[FetchedRange]:
    """Fetches ranges of objects, all in flight together.

    Args:
        sources: the objects.
        ranges: `[M, 3]` number of the object, first byte and the one after the last; sorted, and none of them empty.

    Raises:
        StoreError: an object was replaced, or the store does not give it.
    """
    parts = [
        (number, part, min(part + _MOST_BYTES, stop), start, stop)
        for number, start, stop in ranges.tolist()
        for part in range(start, stop, _MOST_BYTES)
    ]
    answers = stores.fetch(
        [ObjectRange(sources[number].address, sources[number].stamp, start, stop) for number, start, stop, *_ in parts]
    )
    fetched: list[FetchedRange] = []
    for (number, part, _, start, stop), answer in zip(parts, answers, strict=True):
        content = np.frombuffer(answer, dtype=np.uint8)
        if len(content) == stop - start:
            fetched.append(FetchedRange(number, start, content))
            continue
        if part == start:
            fetched.append(FetchedRange(number, start, np.empty(stop - start, dtype=np.uint8)))
        fetched[-1].content[part - start : part - start + len(content)] = content
    return fetched
