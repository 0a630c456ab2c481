"""Typed wrappers of the kernels of keyed permutations.

Shapes: N positions.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.integers import is_integer
from trackbed.kernels.isa import chosen_level
from trackbed.kernels.outputs import check_output

PERMUTATION_VERSION: Final = _native.PERMUTATION_VERSION
"""Version of the algorithm. The permutation of a (size, key) never changes within a version."""


def permute(
    positions: npt.NDArray[np.int64],
    images: npt.NDArray[np.int64],
    *,
    size: int,
    key: int,
    num_threads: int = 1,
    poll: Poll = None,
) -> None:
    """Fills `images` with the image of each position under the permutation of `[0, size)` selected by `key`.

    Args:
        positions: `[N]` each in `[0, size)`.
        images: `[N]` receives one number in `[0, size)` for each; may be `positions`.
        size: in `[1, 2**63)`.
        key: in `[0, 2**64)`.
        num_threads: at least 1.
        poll: progress callback.

    Raises:
        ArgumentError: an argument is out of range, or the arrays are not int64 vectors of equal length.
    """
    check_size_and_key(size, key)
    check_positions(positions, images, size=size, num_threads=num_threads)
    _native.permute(size, key, positions, images, chosen_level(), num_threads, current_poll(poll))


def find_position(image: int, *, size: int, key: int) -> int:
    """Returns the position in `[0, size)` that `permute` maps to `image`.

    Args:
        image: in `[0, size)`.
        size: in `[1, 2**63)`.
        key: in `[0, 2**64)`.

    Raises:
        ArgumentError: an argument is out of range.
    """
    check_size_and_key(size, key)
    if not 0 <= image < size:
        raise ArgumentError(f"image must be in [0, {size}), found {image}")
    return _native.find_position(size, key, image)


def permute_blocks(
    positions: npt.NDArray[np.int64],
    images: npt.NDArray[np.int64],
    *,
    size: int,
    key: int,
    block: int,
    window: int,
    num_threads: int = 1,
    poll: Poll = None,
) -> None:
    """Fills `images` like `permute`, but permutes blocks of samples first, then the samples of each window of blocks.

    Args:
        positions: `[N]` each in `[0, size)`.
        images: `[N]` receives one number in `[0, size)` for each; may be `positions`.
        size: in `[1, 2**63)`.
        key: in `[0, 2**64)`.
        block: samples in a block, in `[1, 2**63)`; with 1 this is `permute`.
        window: blocks in a window, in `[1, 2**63)`.
        num_threads: at least 1.
        poll: progress callback.

    Raises:
        ArgumentError: an argument is out of range, or the arrays are not int64 vectors of equal length.
    """
    check_size_and_key(size, key)
    check_blocks(block, window)
    check_positions(positions, images, size=size, num_threads=num_threads)
    _native.permute_blocks(size, key, block, window, positions, images, chosen_level(), num_threads, current_poll(poll))


def check_size_and_key(size: int, key: int) -> None:
    """Checks the size and the key of a permutation.

    Raises:
        ArgumentError: `size` is not in `[1, 2**63)`, or `key` not in `[0, 2**64)`.
    """
    if not 1 <= size < 2**63:
        raise ArgumentError(f"a permutation's size must be in [1, 2**63), found {size}")
    if not (is_integer(key) and 0 <= key < 2**64):
        raise ArgumentError(f"a permutation's seed must be a whole number in [0, 2**64), found {key!r}")


def check_blocks(block: int, window: int) -> None:
    """Checks the block and the window of a block permutation.

    Raises:
        ArgumentError: `block` or `window` is not in `[1, 2**63)`.
    """
    if not (1 <= block < 2**63 and 1 <= window < 2**63):
        raise ArgumentError(f"a permutation's block and window must be in [1, 2**63), found {block} and {window}")


def check_positions(
    positions: npt.NDArray[np.int64], images: npt.NDArray[np.int64], *, size: int, num_threads: int
) -> None:
    """Checks the arguments of `permute` that `check_size_and_key` does not.

    Raises:
        ArgumentError: the arrays are not int64 vectors of equal length, a position is not in `[0, size)`, or
            `num_threads` is below 1.
    """
    check_output("images", images, dtypes=(np.int64,))
    if positions.dtype != np.int64 or not positions.flags.c_contiguous or not positions.flags.aligned:
        raise ArgumentError(f"positions must be a contiguous, aligned array of int64, found {positions.dtype}")
    if positions.ndim != 1 or positions.shape != images.shape:
        raise ArgumentError(
            f"positions and images must be vectors of one length, found {positions.shape} and {images.shape}"
        )
    if num_threads < 1:
        raise ArgumentError(f"num_threads must be at least 1, found {num_threads}")
    if len(positions) and not (positions.min() >= 0 and positions.max() < size):
        wrong = int(np.flatnonzero((positions < 0) | (positions >= size))[0])
        raise ArgumentError(f"positions must be in [0, {size}), but positions[{wrong}] = {positions[wrong]}")
