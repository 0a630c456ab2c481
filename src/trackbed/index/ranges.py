"""Arrays of consecutive numbers that share memory."""

from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

_STEP: Final = 1 << 15
_FEWEST: Final = 1 << 12
_INT32: Final = np.dtype(np.int32)
_INT64: Final = np.dtype(np.int64)
_MOST_INT32: Final = int(np.iinfo(np.int32).max)


class _Shared:
    """The numbers from 0 up to the largest one requested; ranges are views of them."""

    def __init__(self) -> None:
        self.numbers: dict[str, npt.NDArray[np.integer[Any]]] = {}
        self.made: WeakValueDictionary[int, npt.NDArray[np.integer[Any]]] = WeakValueDictionary()
        """The same and shorter ones that views keep alive, by `id`."""

    def up_to(self, stop: int) -> npt.NDArray[np.integer[Any]]:
        """The numbers from 0, at least `stop` of them; int32 where they fit, else int64."""
        fits = stop <= _MOST_INT32
        dtype = _INT32 if fits else _INT64
        numbers = self.numbers.get(dtype.char)
        if numbers is None or len(numbers) < stop:
            count = max(stop + stop // 8, _FEWEST)  # a few more, because the next range may be a little longer
            count = min(count, _MOST_INT32) if fits else count
            numbers = np.arange(count, dtype=dtype)
            numbers.flags.writeable = False
            self.made[id(numbers)] = numbers
            self.numbers[dtype.char] = numbers  # existing views keep the shorter array alive
        return numbers


_SHARED: Final = _Shared()


def number_range(start: int, stop: int) -> npt.NDArray[np.integer[Any]]:
    """The numbers `[start, stop)`, read-only; int32 where `stop` fits it, else int64.

    All ranges of a process are views of one array, so thousands of datasets take the memory of the longest range.

    >>> number_range(2, 5).tolist()
    [2, 3, 4]
    """
    return _SHARED.up_to(stop)[start:stop]


def bounds_of(numbers: npt.NDArray[np.integer[Any]]) -> tuple[int, int] | None:
    """Bounds `(first, last + 1)` if the numbers are consecutive, else None.

    >>> bounds_of(np.array([4, 5, 6])), bounds_of(np.array([4, 6]))
    ((4, 7), None)
    """
    if len(numbers) == 0:
        return 0, 0
    first, last = int(numbers[0]), int(numbers[-1])
    if last - first != len(numbers) - 1:
        return None
    shared = _SHARED.made.get(id(numbers.base))
    is_view = shared is not None and numbers.base is shared and numbers.strides == (numbers.itemsize,)
    if not is_view and not (np.diff(numbers) == 1).all():
        return None
    return first, last + 1


def count_from(array: npt.NDArray[np.integer[Any]], start: int) -> None:
    """Fills a vector with `start`, `start + 1` and so on, without a temporary of its size."""
    steps = np.arange(min(_STEP, len(array)), dtype=array.dtype)
    for first in range(0, len(array), _STEP):
        stretch = array[first : first + _STEP]
        np.add(steps[: len(stretch)], start + first, out=stretch, dtype=array.dtype)
