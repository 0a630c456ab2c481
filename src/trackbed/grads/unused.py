"""Agreement of the ranks on parameters for which none of them has a gradient."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.grads.collectives.protocol import MAX_NUMBERS, USED, Label

__all__ = ["Exchanger", "lacked_by_all"]

Exchanger = Callable[[npt.NDArray[np.int64], Label], npt.NDArray[np.int64]]

_BITS: Final = 63
"""Parameters that one number of an exchange stands for."""


def lacked_by_all(
    lacking: Sequence[int], counts: npt.NDArray[np.int64], num_params: int, exchange: Exchanger
) -> list[int]:
    """Collective over the ranks if each of them lacks a gradient: returns the parameters that all of them lack.

    Args:
        lacking: numbers of the parameters without a gradient on this rank, each in `[0, num_params)`.
        counts: `[ranks]` how many each rank lacks, the same on every rank.
        num_params: number of parameters, the same on every rank.
        exchange: sends numbers of this rank to all ranks.
    """
    if not counts.all():
        return []
    flags = np.zeros((-(-num_params // _BITS), _BITS), dtype=np.int64)
    flags.reshape(-1)[lacking] = 1
    words = flags @ (np.int64(1) << np.arange(_BITS, dtype=np.int64))
    rows = [exchange(words[start : start + MAX_NUMBERS], USED) for start in range(0, len(words), MAX_NUMBERS)]
    everywhere = np.bitwise_and.reduce(np.concatenate(rows, axis=1), axis=0)
    return [number for number in lacking if everywhere[number // _BITS] >> (number % _BITS) & 1]
