"""Typed wrapper of the kernel that shuffles as NumPy's legacy `RandomState` does.

Shapes: N elements.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.integers import is_integer
from trackbed.kernels.isa import chosen_level
from trackbed.kernels.outputs import check_output

Twister = npt.NDArray[np.uint32]
"""`[625]` state of MT19937: 624 words, and the index of the next one to draw."""

_WORDS: Final = 624


def new_twister(seed: int) -> Twister:
    """State of the generator after `RandomState(seed)`.

    Args:
        seed: in `[0, 2**32)`.

    Raises:
        ArgumentError: the seed is outside that range.
    """
    if not (is_integer(seed) and 0 <= seed < 2**32):
        raise ArgumentError(f"random_seed must be a whole number in [0, 2**32), found {seed!r}")
    twister = np.empty(_WORDS + 1, dtype=np.uint32)
    _native.seed_twister(twister, seed)
    return twister


def legacy_shuffle(twister: Twister, array: npt.NDArray[np.integer[Any]], *, poll: Poll = None) -> None:
    """Shuffle `array` in place, as `RandomState.shuffle` does, and advance `twister`.

    Args:
        twister: state from `new_twister`, possibly advanced by earlier shuffles.
        array: `[N]` int32, uint32, int64 or uint64.
        poll: progress callback.

    Raises:
        ArgumentError: `array` has another type or shape, or cannot be written in place, or `twister` is not a state.
    """
    check_output("twister", twister, dtypes=(np.uint32,))
    if twister.shape != (_WORDS + 1,) or twister[-1] > _WORDS:
        raise ArgumentError(
            f"twister must hold {_WORDS} words and a position in [0, {_WORDS}], found shape {list(twister.shape)}"
        )
    if array.ndim != 1:
        raise ArgumentError(f"array must be a vector, found shape {list(array.shape)}")
    check_output("array", array, dtypes=(np.int32, np.uint32, np.int64, np.uint64))
    _native.legacy_shuffle(twister, array.view(f"u{array.dtype.itemsize}"), chosen_level(), current_poll(poll))
