"""Headers and sequence lengths of many pairs, read at once.

A start opens thousands of pairs and reads most of them much later, or never. Mapping each of thousands of indexes
instead would take memory, and several system calls for which other threads wait.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from trackbed.errors import StoreError
from trackbed.files import Stamp, read_parts, read_stamps
from trackbed.files.stores import ObjectStamp, is_address
from trackbed.tokens.format import PairHeader, SequenceIndex, read_ends
from trackbed.tokens.idx_header import HEADER_BYTES
from trackbed.tokens.paths import get_bin_path, get_idx_path
from trackbed.tokens.stored.index_cache import fetch_indexes
from trackbed.tokens.stored.open_pairs import open_stored_pairs

_NUM_THREADS: Final = 8
"""Pairs that are read at once: on a network file system each waits for a few answers."""


def read_headers(prefixes: Iterable[str], *, idx_cache: str | None = None) -> dict[str, PairHeader]:
    """Reads the headers of pairs, by prefix. Leaves out those that cannot be read: opening them says why.

    Args:
        prefixes: of pairs; may be repeated.
        idx_cache: folder of copies of `.idx` objects; without one, pairs at addresses are left out.

    Raises:
        StoreError: an object store refuses, or does not answer in time.
    """
    wanted = list(dict.fromkeys(prefixes))
    stored = [prefix for prefix in wanted if is_address(prefix)] if idx_cache is not None else []
    headers = _read_files([prefix for prefix in wanted if not is_address(prefix)])
    if stored and idx_cache is not None:
        for prefix, answer in zip(stored, open_stored_pairs(stored, idx_cache), strict=True):
            if isinstance(answer, StoreError):  # asking again would take as long
                raise answer
            if isinstance(answer, PairHeader):
                headers[prefix] = answer
    return headers


def _read_files(prefixes: list[str]) -> dict[str, PairHeader]:
    ends = read_ends([get_idx_path(prefix) for prefix in prefixes], num_threads=_NUM_THREADS)
    stamps = read_stamps([get_bin_path(prefix) for prefix in prefixes], num_threads=_NUM_THREADS).tolist()
    return {
        prefix: PairHeader(found, Stamp(*stamp))
        for prefix, found, stamp in zip(prefixes, ends, stamps, strict=True)
        if found is not None and stamp[1] >= 0
    }


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
    lengths: list[npt.NDArray[np.int32] | None] = []
    first = 0
    for index, size, stamp in zip(indexes, sizes, stamps.tolist(), strict=True):
        wanted = index.ends.stamp
        is_same = wanted == tuple(stamp) if isinstance(wanted, Stamp) else wanted.size_bytes == stamp[1]
        lengths.append(content[first : first + size].view("<i4") if is_same else None)
        first += size
    return lengths
