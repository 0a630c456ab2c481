"""Columns of numbers from the lines of a record, and their reduction to as many points as a picture shows.

Shapes: N lines, P points.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

MOST_POINTS: Final = 1000
"""Most values that a line shows one by one."""
_NUM_BINS: Final = 333
"""Bins of a line with more values; each has a mean, a minimum and a maximum."""
_LARGEST: Final = 1e300
"""Values beyond are drawn here, so that differences stay finite."""


@dataclass(frozen=True, slots=True, eq=False)
class Extreme:
    """A value, and its step."""

    step: int
    value: float


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Values over steps, reduced to the points of a picture, and exact numbers of all of them."""

    x: Floats
    """`[P]` steps, in rising order."""
    mean: Floats
    """`[P]` values, or means of bins; NaN where none is known."""
    low: Floats | None
    """`[P]` minimum of each bin; None if each point is one value."""
    high: Floats | None
    """`[P]` maximum of each bin."""
    num_values: int
    """Number of known values."""
    num_unknown: int
    """Number of lines without a value."""
    average: float
    first: Extreme
    last: Extreme
    lowest: Extreme
    highest: Extreme


_NUMBER_TYPES: Final = {int, float, type(None)}


def as_number(value: object) -> float:
    """Returns a value from JSON as a number; NaN if it is none, or not finite.

    >>> as_number(3), as_number(True), as_number("3"), as_number(None)
    (3.0, nan, nan, nan)
    """
    if type(value) is float or type(value) is int:
        return min(max(float(value), -_LARGEST), _LARGEST) if math.isfinite(value) else math.nan
    return math.nan


def as_whole(value: object) -> int | None:
    """Returns a whole number from JSON; None if the value is another."""
    return value if type(value) is int and -(2**62) < value < 2**62 else None


def column(lines: Sequence[Mapping[str, Any]], key: str) -> Floats:
    """Returns `[N]` values of a key; NaN where a line has no number."""
    return floats([line.get(key) for line in lines])


def floats(values: Sequence[object]) -> Floats:
    """Returns values from JSON as numbers, as `as_number` does.

    >>> floats([1, 2.5, None]), floats([1, "2"])
    (array([1. , 2.5, nan]), array([ 1., nan]))
    """
    if set(map(type, values)) <= _NUMBER_TYPES:  # then NumPy converts all at once, None to NaN
        found = np.array(values, dtype=np.float64)
        return np.clip(np.where(np.isfinite(found), found, np.nan), -_LARGEST, _LARGEST)
    return np.array([as_number(value) for value in values], dtype=np.float64)


def steps_of(lines: Sequence[Mapping[str, Any]]) -> Integers:
    """Returns `[N]` numbers of the steps."""
    return np.fromiter((as_whole(line["step"]) or 0 for line in lines), dtype=np.int64, count=len(lines))


def bins_of(steps: Integers, num_bins: int) -> Integers:
    """Returns `[N]` bin of each step; bins are ranges of steps of one length.

    >>> bins_of(np.array([1, 2, 3, 9]), 3).tolist()
    [0, 0, 0, 2]
    """
    if not len(steps):
        return np.empty(0, dtype=np.int64)
    first, span = int(steps.min()), int(steps.max()) - int(steps.min()) + 1
    found: Integers = np.minimum((steps - first) * (num_bins / span), num_bins - 1).astype(np.int64)
    return found


def curve(steps: Integers, values: Floats) -> Curve | None:
    """Returns the curve of values over steps; None if no value is known.

    Args:
        steps: `[N]` steps.
        values: `[N]` values; NaN where none is known.

    >>> found = curve(np.arange(1, 5001), np.arange(5000, dtype=np.float64))
    >>> len(found.x), float(found.low[0]), float(found.high[-1]), found.average
    (333, 0.0, 4999.0, 2499.5)
    """
    if len(steps) > 1 and (np.diff(steps) < 0).any():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return None
    kept, numbers = steps[known], values[known]

    def extreme(index: int) -> Extreme:
        return Extreme(int(kept[index]), float(numbers[index]))

    x, mean, low, high = (
        (steps.astype(np.float64), values, None, None) if len(steps) <= MOST_POINTS else _binned(kept, numbers)
    )
    return Curve(
        x=x,
        mean=mean,
        low=low,
        high=high,
        num_values=len(known),
        num_unknown=len(values) - len(known),
        average=float(numbers.mean()),
        first=extreme(0),
        last=extreme(-1),
        lowest=extreme(int(numbers.argmin())),
        highest=extreme(int(numbers.argmax())),
    )


def _binned(steps: Integers, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns step, mean, minimum and maximum of each bin; a NaN stands between bins with empty ones between them."""
    bins = bins_of(steps, _NUM_BINS)
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    counts = np.diff(np.append(starts, len(bins)))
    gaps = np.flatnonzero(np.diff(bins[starts]) > 1) + 1
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    mean = np.clip(np.add.reduceat(values, starts) / counts, low, high)  # sums are rounded
    columns = (np.add.reduceat(steps.astype(np.float64), starts) / counts, mean, low, high)
    x, mean, low, high = (np.insert(one, gaps, np.nan) for one in columns)
    x[np.isnan(x)] = 0.0  # never drawn: the values beside it are NaN
    return x, mean, low, high


def spread(count: int, most: int) -> list[int]:
    """Returns at most `most` positions in `[0, count)`, at equal distances, with the first and the last.

    >>> spread(3, 5), spread(100, 4)
    ([0, 1, 2], [0, 33, 66, 99])
    """
    return list(range(count)) if count <= most else np.linspace(0, count - 1, most, dtype=np.int64).tolist()


def numeric_keys(lines: Iterable[Mapping[str, Any]], *, known: Iterable[str]) -> list[str]:
    """Returns the keys for which some line has a number, sorted, without the known ones.

    >>> numeric_keys([{"step": 1, "lr": 0.1, "note": "a"}, {"zeta": 2}], known=["step"])
    ['lr', 'zeta']
    """
    settled = set(known)
    found = set()
    for line in lines:
        for key in line.keys() - settled:
            if not math.isnan(as_number(line[key])):
                found.add(key)
                settled.add(key)
    return sorted(found)
