"""Shuffles of any size that are computed on demand instead of stored.

Shapes: N positions.
"""

from functools import cached_property
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.errors import ArgumentError

PERMUTATION_VERSION: Final = kernels.PERMUTATION_VERSION
"""Version of the algorithm. The permutation of a (size, seed) never changes within a version."""

_LARGEST: Final = int(np.iinfo(np.int64).max)
_LARGEST_TABLE: Final = 1024
"""Permutations of smaller sizes need many rounds per position, so a table of all images is kept instead."""


class _Bijection:
    """Callable bijection of `[0, size)`; subclasses define the image of each position."""

    def __init__(self, size: int, seed: int) -> None:
        kernels.check_size_and_key(size, seed)
        self._size = int(size)
        self._seed = int(seed)

    def __len__(self) -> int:
        """Number of positions."""
        return self._size

    @overload
    def __call__(self, positions: int, *, num_threads: int = 1) -> int: ...

    @overload
    def __call__(self, positions: npt.NDArray[np.integer[Any]], *, num_threads: int = 1) -> npt.NDArray[np.int64]: ...

    def __call__(
        self, positions: int | npt.NDArray[np.integer[Any]], *, num_threads: int = 1
    ) -> int | npt.NDArray[np.int64]:
        """Maps one position, or each position of an array, to its image.

        Args:
            positions: an integer, or an array of any integer type and shape, in `[0, size)`.
            num_threads: threads for an array, at least 1.

        Returns:
            An int for an integer, or an int64 array of the same shape for an array.
        """
        given = np.asarray(positions)
        if given.dtype.kind not in "iu" and given.size > 0:
            raise ArgumentError(f"positions must be integers, found {given.dtype}")
        if given.dtype == np.uint64 and given.size > 0 and given.max() > _LARGEST:
            raise ArgumentError(f"positions must be at most {_LARGEST}, found {given.max()}")
        flat = np.ascontiguousarray(given, dtype=np.int64).reshape(-1)
        images = np.empty(flat.shape, dtype=np.int64)
        self._permute(flat, images, num_threads)
        if given.ndim == 0 and not isinstance(positions, np.ndarray):
            return int(images[0])
        return images.reshape(given.shape)

    def _permute(self, positions: npt.NDArray[np.int64], images: npt.NDArray[np.int64], num_threads: int) -> None:
        raise NotImplementedError


class Permutation(_Bijection):
    """A bijection of `[0, size)` determined by `size` and `seed` alone, computed in constant time and memory.

    Args:
        size: in `[1, 2**63)`.
        seed: in `[0, 2**64)`.

    Raises:
        ArgumentError: an argument is out of range.

    >>> shuffle = Permutation(10, seed=1234)
    >>> shuffle(np.arange(10)).tolist()
    [0, 1, 2, 9, 8, 6, 3, 5, 4, 7]
    >>> shuffle(3)
    9
    """

    def __init__(self, size: int, *, seed: int) -> None:
        super().__init__(size, seed)

    def __getstate__(self) -> dict[str, Any]:
        """Copy of the state: another thread may compute the table meanwhile."""
        return vars(self).copy()

    @cached_property
    def _table(self) -> npt.NDArray[np.int64]:
        """`[size]` all images."""
        images = np.arange(self._size)
        kernels.permute(images, images, size=self._size, key=self._seed)
        return images

    def _permute(self, positions: npt.NDArray[np.int64], images: npt.NDArray[np.int64], num_threads: int) -> None:
        if self._size < _LARGEST_TABLE:
            kernels.check_positions(positions, images, size=self._size, num_threads=num_threads)
            np.take(self._table, positions, out=images, mode="clip")
        else:
            kernels.permute(positions, images, size=self._size, key=self._seed, num_threads=num_threads)


class BlockPermutation(_Bijection):
    """A bijection of `[0, size)` that keeps reads contiguous, at the cost of a less thorough shuffle.

    Blocks of `block` samples are permuted first. Then the samples of each window of `window` consecutive blocks are
    permuted. Reading each block of a window in one contiguous read yields all samples of that window. The last block
    may be shorter, and is permuted like the others. With `block=1` this is `Permutation`.

    Args:
        size: in `[1, 2**63)`.
        seed: in `[0, 2**64)`.
        block: samples in a block, in `[1, 2**63)`.
        window: blocks in a window, in `[1, 2**63)`.

    Raises:
        ArgumentError: an argument is out of range.

    >>> shuffle = BlockPermutation(10, seed=1234, block=4, window=2)
    >>> shuffle(np.arange(10)).tolist()
    [9, 4, 8, 7, 6, 5, 0, 2, 3, 1]
    """

    def __init__(self, size: int, *, seed: int, block: int, window: int) -> None:
        super().__init__(size, seed)
        kernels.check_blocks(block, window)
        self._block = int(block)
        self._window = int(window)

    def _permute(self, positions: npt.NDArray[np.int64], images: npt.NDArray[np.int64], num_threads: int) -> None:
        kernels.permute_blocks(
            positions,
            images,
            size=self._size,
            key=self._seed,
            block=self._block,
            window=self._window,
            num_threads=num_threads,
        )
