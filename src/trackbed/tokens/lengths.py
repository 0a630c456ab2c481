"""Batched reads of sequence lengths from many small index files.

Mapping each of thousands of indexes instead would take memory, and several system calls for which other threads wait.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from trackbed.files import Stamp, read_parts
from trackbed.files.stores import ObjectStamp
from trackbed.tokens.format import SequenceIndex
from trackbed.tokens.idx_header import HEADER_BYTES
from trackbed.tokens.stored.index_cache import fetch_indexes


def fetch_copies(indexes: Iterable[SequenceIndex]) -> None:
    """Fetches copies of the indexes that lie in object stores, several of them together.

    Raises:
        ArgumentError: the folder of the copies cannot be written to.
        StoreError: an object was replaced, or a store does not give it.
    """
    fetch_indexes(
        [(one.stored, one.ends.stamp) for one in indexes if one.stored and isinstance(one.ends.stamp, ObjectStamp)]
    )


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
    fetch_copies(indexes)
    paths = [f"{index.path if index.stored is None else index.local_path()}" for index in indexes]
    content, stamps = read_parts(paths, starts, sizes)
    found: list[npt.NDArray[np.int32] | None] = []
    first = 0
    for index, size, stamp in zip(indexes, sizes, stamps.tolist(), strict=True):
        wanted = index.ends.stamp
        is_same = wanted == tuple(stamp) if isinstance(wanted, Stamp) else wanted.size_bytes == stamp[1]
        found.append(content[first : first + size].view("<i4") if is_same else None)
        first += size
    return found
