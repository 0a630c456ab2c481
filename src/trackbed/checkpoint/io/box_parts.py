"""Parts of boxes: rectangular blocks of tensors, and the ranges of their elements in a file. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final

Numbers = tuple[int, ...]

_STEP_BYTES: Final = 16 << 20
_LONG_ROW_BYTES: Final = 4 << 20
"""Rows from this size on are read one by one where only a part of each is wanted."""


@dataclass(frozen=True, slots=True)
class Slab:
    """Consecutive elements of a box, from `index + (low, 0, ...)` to before `index + (high, 0, ...)`."""

    index: Numbers
    """Place along the first axes, along each of which the slab has one element."""
    low: int
    """First place along the next axis."""
    high: int
    """End along that axis."""
    start: int
    """First element in row-major order."""
    num_elements: int

    def is_whole(self, shape: Numbers, first: Numbers, end: Numbers) -> bool:
        """True if the part `[first, end)` of a box of that shape has all elements of the slab."""
        below = len(self.index) + 1
        return all(
            (low, high) == (0, size) for low, high, size in zip(first[below:], end[below:], shape[below:], strict=True)
        )


def slabs_of(shape: Numbers, first: Numbers, end: Numbers, element_bytes: int) -> Iterator[Slab]:
    """Yields slabs of a box that together have all elements of a part of it, each of few MiB.

    Args:
        shape: shape of the box, with at least one axis.
        first: first element of the part, along each axis.
        end: end of the part, along each axis.
        element_bytes: size of an element.

    >>> [(slab.start, slab.num_elements) for slab in slabs_of((4, 6), (1, 2), (3, 4), 4)]
    [(6, 12)]
    """
    yield from _below((), shape, first, end, element_bytes)


def _below(index: Numbers, shape: Numbers, first: Numbers, end: Numbers, element_bytes: int) -> Iterator[Slab]:
    axis = len(index)
    row = prod(shape[axis + 1 :])
    is_whole = all(
        (low, high) == (0, size)
        for low, high, size in zip(first[axis + 1 :], end[axis + 1 :], shape[axis + 1 :], strict=True)
    )
    if not is_whole and row * element_bytes >= _LONG_ROW_BYTES:
        for place in range(first[axis], end[axis]):
            yield from _below((*index, place), shape, first, end, element_bytes)
        return
    start = sum(place * prod(shape[number + 1 :]) for number, place in enumerate(index))
    step = max(1, _STEP_BYTES // max(1, row * element_bytes))
    if is_whole:
        step = max(step, end[axis] - first[axis])  # it goes straight to its place
    for low in range(first[axis], end[axis], step):
        high = min(low + step, end[axis])
        yield Slab(index, low, high, start + low * row, (high - low) * row)


def boxes(shape: Numbers, start: int, stop: int) -> list[tuple[Numbers, Numbers]]:
    """Returns the boxes of a tensor that have a range of its elements in row-major order, in that order.

    Args:
        shape: shape of the tensor, D axes.
        start: first element of the range.
        stop: element after its last one.

    Returns:
        First element and shape of each; at most `max(1, 2 * D - 1)` boxes, and none for an empty range.

    >>> boxes((3, 4), 2, 9)
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    (first, low), (last, high) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, shape, low, high)
    found = []
    if low:
        found += _in_row(first, shape, low, row)
        first += 1
    if first < last:
        found.append(((first, *(0,) * len(shape[1:])), (last - first, *shape[1:])))
    return found + (_in_row(last, shape, 0, high) if high else [])


def _in_row(place: int, shape: Numbers, start: int, stop: int) -> list[tuple[Numbers, Numbers]]:
    """Boxes of a range of elements at one place of the first axis."""
    return [((place, *first), (1, *size)) for first, size in boxes(shape[1:], start, stop)]


def cut_box(first: Numbers, shape: Numbers, element_bytes: int, max_bytes: int) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields first element and shape of boxes of some size that together have all elements of a box.

    Args:
        first: first element of the box.
        shape: its shape.
        element_bytes: size of an element.
        max_bytes: size that none of them exceeds, at least that of an element.

    >>> list(cut_box((0, 5), (2, 4), 1, 4))
    [((0, 5), (1, 4)), ((1, 5), (1, 4))]
    """
    num_bytes = prod(shape) * element_bytes
    if num_bytes <= max_bytes:
        yield first, shape
        return
    axis = next(axis for axis, size in enumerate(shape) if size > 1)
    step = max(1, shape[axis] * max_bytes // num_bytes)
    for place in range(0, shape[axis], step):
        low = (*first[:axis], first[axis] + place, *first[axis + 1 :])
        size = (*shape[:axis], min(step, shape[axis] - place), *shape[axis + 1 :])
        yield from cut_box(low, size, element_bytes, max_bytes)
