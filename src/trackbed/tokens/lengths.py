"""Batched reads of sequence lengths from many small index files.

Mapping each of thousands of indexes instead would take memory, and several system calls for which other threads wait.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trackbed.files import read_parts
from trackbed.tokens.format import HEADER_BYTES, SequenceIndex

__all__ = ["read_lengths"]


def read_lengths(
    indexes: Sequence[SequenceIndex], ranges: Sequence[tuple[int, int]]
) -> list[npt.NDArray[np.int32] | None]:
    """Lengths of a range of sequences of each index, or None if the file was replaced since it was opened.

    Args:
        indexes: opened indexes; the call does not map them.
        ranges: `(first, last + 1)` sequence of each index.
    """
    starts = [HEADER_BYTES + 4 * start for start, _ in ranges]
    sizes = [4 * (stop - start) for start, stop in ranges]
    content, stamps = read_parts([f"{index.path}" for index in indexes], starts, sizes)
    found: list[npt.NDArray[np.int32] | None] = []
    first = 0
    for index, size, stamp in zip(indexes, sizes, stamps.tolist(), strict=True):
        found.append(content[first : first + size].view("<i4") if index.ends.stamp == tuple(stamp) else None)
        first += size
    return found
