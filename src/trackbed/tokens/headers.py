"""Headers of many pairs, read at once: a start opens thousands of pairs and reads most of them much later, or never."""

from collections.abc import Iterable
from typing import Final

from trackbed.errors import StoreError
from trackbed.files import Stamp, read_stamps
from trackbed.files.stores import is_address
from trackbed.tokens.format import PairHeader, read_ends
from trackbed.tokens.paths import get_bin_path, get_idx_path
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
    found = _read_files([prefix for prefix in wanted if not is_address(prefix)])
    if stored and idx_cache is not None:
        for prefix, answer in zip(stored, open_stored_pairs(stored, idx_cache), strict=True):
            if isinstance(answer, StoreError):  # asking again would take as long
                raise answer
            if isinstance(answer, PairHeader):
                found[prefix] = answer
    return found


def _read_files(prefixes: list[str]) -> dict[str, PairHeader]:
    ends = read_ends([get_idx_path(prefix) for prefix in prefixes], num_threads=_NUM_THREADS)
    stamps = read_stamps([get_bin_path(prefix) for prefix in prefixes], num_threads=_NUM_THREADS).tolist()
    return {
        prefix: PairHeader(found, Stamp(*stamp))
        for prefix, found, stamp in zip(prefixes, ends, stamps, strict=True)
        if found is not None and stamp[1] >= 0
    }
