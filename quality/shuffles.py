"""What the suite is run on: Trackbed's permutation, one that is random, and some that must be rejected.

Shapes: N positions.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trackbed.index import BlockPermutation, Permutation

Positions = npt.NDArray[np.int64]
Shuffle = Callable[[int, int], Callable[[Positions], Positions]]
"""`shuffle(size, seed)` is a function from positions `[N]` to images `[N]`, all in `[0, size)`."""


def trackbed(size: int, seed: int) -> Callable[[Positions], Positions]:
    """The full permutation."""
    return Permutation(size, seed=seed)


def blocks(*, block: int, window: int) -> Shuffle:
    """Trackbed's permutation of blocks, and of samples in windows of blocks."""

    def shuffle(size: int, seed: int) -> Callable[[Positions], Positions]:
        return BlockPermutation(size, seed=seed, block=block, window=window)

    return shuffle


def random(size: int, seed: int) -> Callable[[Positions], Positions]:
    """A shuffle by NumPy that holds all images: what every statistic must accept, for sizes that fit memory."""
    images = np.random.default_rng(seed).permutation(size)
    return images.__getitem__


def few_rounds(rounds: int) -> Shuffle:
    """The network of Trackbed's permutation with a given even number of rounds, in NumPy."""

    def shuffle(size: int, seed: int) -> Callable[[Positions], Positions]:
        rows = math.isqrt(size - 1) + 1
        rows += rows % 2 if size > 1 else 0
        columns = -(-size // rows)
        keys = np.random.default_rng(seed).integers(0, 2**64, rounds, dtype=np.uint64)

        def images(positions: Positions) -> Positions:
            cells = _passed(positions.astype(np.uint64), rows, columns, keys)
            while (outside := cells >= np.uint64(size)).any():
                cells[outside] = _passed(cells[outside], rows, columns, keys)
            return cells.astype(np.int64)

        return images

    return shuffle


def grain(size: int, seed: int) -> Callable[[Positions], Positions]:
    """Grain's `index_shuffle`, with the four rounds that it uses itself.

    Raises:
        ImportError: grain is not installed.
    """
    from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

    def images(positions: Positions) -> Positions:
        shuffled = [
            index_shuffle_module.index_shuffle(int(position), max_index=size - 1, seed=seed, rounds=4)
            for position in positions
        ]
        return np.array(shuffled, dtype=np.int64)

    return images


def _passed(
    cells: npt.NDArray[np.uint64], rows: int, columns: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    row, column = np.divmod(cells, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2:
            column = (column + _hash(row, key, columns)) % np.uint64(columns)
        else:
            row = (row + _hash(column, key, rows)) % np.uint64(rows)
    return row * np.uint64(columns) + column


def _hash(coordinate: npt.NDArray[np.uint64], key: np.uint64, bound: int) -> npt.NDArray[np.uint64]:
    bits = (coordinate ^ key) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ bits >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return (bits >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)
