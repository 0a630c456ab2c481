"""Positions that a run leaves out."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from trackbed.errors import ArgumentError
from trackbed.kernels.integers import is_integer


class Skipped:
    """Ranges of positions to leave out.

    Args:
        ranges: pairs of the first and the last position of each range.

    Raises:
        ArgumentError: one is no pair of whole numbers, or its last position is below its first.

    >>> Skipped([[2, 3], [4, 4], [8, 9]]).next_positions(0, 5, total=12)
    [0, 1, 5, 6, 7]
    >>> Skipped().next_positions(3, 2, total=12)
    range(3, 5)
    """

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        pairs = []
        if not isinstance(ranges, Iterable):
            raise ArgumentError(f"skip must be pairs of a first and a last position, found {ranges!r}")
        for one in ranges:
            pair = tuple(one) if isinstance(one, Sequence) and not isinstance(one, (str, bytes)) else ()
            if len(pair) != 2 or not all(map(is_integer, pair)) or not 0 <= pair[0] <= pair[1] < 2**63:
                raise ArgumentError(f"skip must have pairs of a first and a last position, found {one!r}")
            pairs.append((int(pair[0]), int(pair[1]) + 1))
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(pairs):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], stop)
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def num_kept(self, total: int) -> int:
        """Returns how many of the first `total` positions are not left out."""
        pairs = zip(self._starts, self._stops, strict=True)
        return total - sum(min(stop, total) - min(start, total) for start, stop in pairs)

    def ranges(self) -> list[list[int]]:
        """Pairs of the first and the last position, in rising order, which do not touch."""
        return [[start, stop - 1] for start, stop in zip(self._starts, self._stops, strict=True)]

    def next_positions(self, first: int, count: int, *, total: int) -> Sequence[int]:
        """Returns the next positions that are not left out.

        Args:
            first: position from which to count.
            count: most positions.
            total: number of positions of the dataset.
        """
        number = bisect_right(self._stops, first)
        found: list[int] = []
        while number < len(self._starts) and self._starts[number] < min(total, first + count - len(found)):
            found += range(first, self._starts[number])
            first = max(first, self._stops[number])
            number += 1
        rest = range(first, max(first, min(total, first + count - len(found))))
        return [*found, *rest] if found else rest
