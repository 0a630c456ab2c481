"""Which sample comes k-th in a shuffle that is computed where it is asked for, and stored nowhere.

Shapes: N positions.
"""

from collections.abc import Callable
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.errors import ArgumentError

__all__ = ["PERMUTATION_VERSION", "Permutation"]

PERMUTATION_VERSION: Final = kernels.PERMUTATION_VERSION
"""What a (size, seed) gives never changes within a version."""

_LARGEST: Final = int(np.iinfo(np.int64).max)


class Permutation:
    """A bijection of `[0, size)` that follows from `size` and `seed` alone, in constant time and memory.

    Args:
        size: in `[1, 2**63)`.
        seed: in `[0, 2**64)`.

    Raises:
        ArgumentError: an argument is out of range.

    >>> shuffle = Permutation(10, seed=1234)
    >>> shuffle(np.arange(10)).tolist()
    [7, 9, 5, 1, 6, 8, 4, 2, 0, 3]
    >>> shuffle(3)
    1
    """

    def __init__(self, size: int, *, seed: int) -> None:
        kernels.check_size_and_key(size, seed)
        self._size = int(size)
        self._seed = int(seed)

    def __len__(self) -> int:
        """How many positions there are."""
        return self._size

    @overload
    def __call__(self, positions: int, *, num_threads: int = 1) -> int: ...

    @overload
    def __call__(self, positions: npt.NDArray[np.integer[Any]], *, num_threads: int = 1) -> npt.NDArray[np.int64]: ...

    def __call__(
        self, positions: int | npt.NDArray[np.integer[Any]], *, num_threads: int = 1
    ) -> int | npt.NDArray[np.int64]:
        """What comes at one position, or at each position of an array.

        Args:
            positions: an integer, or integers of any type and shape, in `[0, size)`.
            num_threads: threads for an array, at least 1.

        Returns:
            An int for an integer, and int64 of the same shape for an array.

        Raises:
            ArgumentError: a position is no integer in `[0, size)`, or `num_threads` is below 1.
        """

        def permute(flat: npt.NDArray[np.int64], images: npt.NDArray[np.int64]) -> None:
            kernels.permute(flat, images, size=self._size, key=self._seed, num_threads=num_threads)

        return _images(positions, permute)


def _images(
    positions: int | npt.NDArray[np.integer[Any]],
    permute: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], None],
) -> int | npt.NDArray[np.int64]:
    """What `permute` makes of a vector, for an integer or an array of any shape."""
    given = np.asarray(positions)
    if given.dtype.kind not in "iu" and given.size > 0:
        msg = f"positions must be integers, found {given.dtype}"
        raise ArgumentError(msg)
    if given.dtype == np.uint64 and given.size > 0 and given.max() > _LARGEST:
        msg = f"positions must be at most {_LARGEST}, found {given.max()}"
        raise ArgumentError(msg)
    flat = np.ascontiguousarray(given, dtype=np.int64).reshape(-1)
    images = np.empty(flat.shape, dtype=np.int64)
    permute(flat, images)
    if given.ndim == 0 and not isinstance(positions, np.ndarray):
        return int(images[0])
    return images.reshape(given.shape)
