"""Lengths of sequences, read from many small index files at once.

Each pair of thousands would else be mapped for them: memory, and a few calls of the system that other threads wait for.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trackbed.files import read_parts
from trackbed.tokens.format import HEADER_BYTES, SequenceIndex

__all__ = ["read_lengths"]


def read_lengths(
    indexes: Sequence[SequenceIndex], runs: Sequence[tuple[int, int]]
) -> list[npt.NDArray[np.int32] | None]:
    """Of each index, the tokens in each sequence of a run; None where it is not the file that was opened.

    Args:
        indexes: are not mapped, or stay so.
        runs: of each, the first sequence and the one after the last.
    """
    starts = [HEADER_BYTES + 4 * start for start, _ in runs]
    sizes = [4 * (stop - start) for start, stop in runs]
    content, stamps = read_parts([f"{index.path}" for index in indexes], starts, sizes)
    found: list[npt.NDArray[np.int32] | None] = []
    first = 0
    for index, size, stamp in zip(indexes, sizes, stamps.tolist(), strict=True):
        found.append(content[first : first + size].view("<i4") if index.ends.stamp == tuple(stamp) else None)
        first += size
    return found
