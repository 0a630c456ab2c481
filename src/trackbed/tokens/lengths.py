"""Lengths of sequences, read from many small index files at once.

Each pair of thousands would else be mapped for them: memory, and a few calls of the system that other threads wait for.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trackbed.kernels import read_parts
from trackbed.tokens.format import HEADER_BYTES, SequenceIndex

__all__ = ["read_lengths"]


def read_lengths(indexes: Sequence[SequenceIndex], stops: Sequence[int]) -> list[npt.NDArray[np.int32] | None]:
    """Of each index, `[stop]` tokens in each of its first sequences; None where it is not the file that was opened.

    Args:
        indexes: are not mapped, or stay so.
        stops: of each, at most its number of sequences.
    """
    sizes = [4 * stop for stop in stops]
    content, stamps = read_parts([f"{index.path}" for index in indexes], [HEADER_BYTES] * len(sizes), sizes)
    found: list[npt.NDArray[np.int32] | None] = []
    numbers, first = content.view("<i4"), 0
    for index, stop, stamp in zip(indexes, stops, stamps.tolist(), strict=True):
        found.append(numbers[first : first + stop] if index.ends.stamp == tuple(stamp) else None)
        first += stop
    return found
