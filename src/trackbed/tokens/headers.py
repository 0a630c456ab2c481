"""Headers of many pairs, read at once: a start opens thousands of pairs and reads most of them much later, or never."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from trackbed.files import Stamp, read_stamps
from trackbed.tokens.format import IndexEnds, read_ends
from trackbed.tokens.paths import get_bin_path, get_idx_path

__all__ = ["PairHeader", "read_headers"]

_NUM_THREADS: Final = 8
"""Pairs that are read at once: on a network file system each waits for a few answers."""


class PairHeader(NamedTuple):
    """Result of opening a pair: what its files say, and which files they are."""

    ends: IndexEnds
    bin_stamp: Stamp


def read_headers(prefixes: Iterable[str]) -> dict[str, PairHeader]:
    """Reads the headers of pairs, by prefix. Leaves out those that cannot be read: opening them says why."""
    wanted = list(dict.fromkeys(prefixes))
    ends = read_ends([get_idx_path(prefix) for prefix in wanted], num_threads=_NUM_THREADS)
    stamps = read_stamps([get_bin_path(prefix) for prefix in wanted], num_threads=_NUM_THREADS).tolist()
    return {
        prefix: PairHeader(found, Stamp(*stamp))
        for prefix, found, stamp in zip(wanted, ends, stamps, strict=True)
        if found is not None and stamp[1] >= 0
    }
