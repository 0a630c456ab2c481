"""Pairs that a blend file names several times in one split: by path, link, pattern, group or address.

Shapes: N names of pairs.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from trackbed.blends.blend_file import DatasetEntry
from trackbed.blends.toml_tables import Problems
from trackbed.files import read_index_ends, read_stamps
from trackbed.files.stores import is_address, parse_address
from trackbed.tokens.paths import get_bin_path, get_idx_path

_THREADS: Final = 8  # on a network file system each waits for an answer


class NamedPair(NamedTuple):
    """A pair under one of its names."""

    entry: DatasetEntry
    """The `[[dataset]]` that names it."""
    prefix: str
    pair: Hashable
    """Its identity, see `pair_ids`."""


def pair_ids(prefixes: Sequence[str]) -> list[Hashable]:
    """Returns the `[N]` identities of pairs, which are equal for two names of one pair, and for no two pairs.

    A pair is its two files: another `.idx` for the same `.bin` makes another pair. Takes one system call a pair; only
    those whose `.bin` is a file that others have too are looked at more closely.
    """
    paths = [_local_path(prefix) for prefix in prefixes]
    files = sorted({path for path in paths if path is not None and "\0" not in path})
    stamps = read_stamps([get_bin_path(path) for path in files], num_threads=_THREADS).tolist()
    by_stamp: defaultdict[tuple[int, int, int], list[str]] = defaultdict(list)
    for path, (inode, size, modified_ns) in zip(files, stamps, strict=True):
        by_stamp[inode, size, modified_ns].append(path)
    missing = {path: os.path.realpath(path) for stamp, some in by_stamp.items() if stamp[1] < 0 for path in some}
    alike = [path for stamp, some in by_stamp.items() if len(some) > 1 and stamp[1] >= 0 for path in some]
    ids: dict[str, Hashable] = {**missing, **dict(zip(alike, _ids_of_files(alike), strict=True))}
    return [
        parse_address(prefix)[1:] if path is None else ids.get(path, path)
        for prefix, path in zip(prefixes, paths, strict=True)
    ]


def _local_path(prefix: str) -> str | None:
    """Returns the path of a pair on a disk, without detours that lead nowhere else; None for a pair in a store."""
    if not is_address(prefix):
        return os.path.normpath(prefix) if ".." not in prefix.split("/") else prefix  # links may lead past a folder
    address = parse_address(prefix)
    return address.key if address.scheme == "file" else None


def _ids_of_files(paths: Sequence[str]) -> list[Hashable]:
    """Returns identities by the `.bin` files, and the beginnings and ends of the `.idx` files, which may be copies."""
    found: list[Hashable] = []
    for path, ends in zip(paths, read_index_ends([get_idx_path(one) for one in paths]), strict=True):
        try:
            status = os.stat(get_bin_path(path))  # noqa: PTH116  the device, which stamps lack
        except OSError:
            found.append(path)
            continue
        index = str(ends) if isinstance(ends, OSError) else (ends.stamp[1], bytes(ends.ends))
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, index))
    return found


def refuse_repeats(pairs: Iterable[NamedPair], problems: Problems) -> None:
    """Adds a problem for each dataset that repeats pairs of a split, unless it says that it does.

    Args:
        pairs: all names of pairs, in the order of the file.
        problems: receives the problems, each with the places of both names.
    """
    earlier: defaultdict[Hashable, list[NamedPair]] = defaultdict(list)
    repeats = []
    for one in pairs:
        first = next((other for other in earlier[one.pair] if _share_a_split(one.entry, other.entry)), None)
        if first is not None and not one.entry.repeated:
            repeats.append((one, first))
        earlier[one.pair].append(one)
    for _, some in groupby(repeats, key=lambda found: (found[0].entry.where, found[1].entry.where)):
        (one, first), *others = some
        more = f", and {len(others)} more pairs of it" if len(others) > 1 else ", and one more" if others else ""
        is_within = one.entry is first.entry
        place = (
            "this dataset" if is_within else problems.place_of((*first.entry.where, first.entry.kind), first.entry.name)
        )
        problems.add(
            (*one.entry.where, one.entry.kind),
            f"must name each pair of a split once, found {one.prefix}, which is {_shown(first, one)} of {place}{more}; "
            "`repeated = true` in its [[dataset]] says that it is meant",
        )


def _shown(first: NamedPair, one: NamedPair) -> str:
    return "that" if first.prefix == one.prefix else f"the pair {first.prefix}"


def _share_a_split(one: DatasetEntry, other: DatasetEntry) -> bool:
    return one.splits is None or other.splits is None or not set(one.splits).isdisjoint(other.splits)


def count_repeated(datasets: Sequence[Sequence[Hashable]]) -> list[dict[Hashable, int]]:
    """Returns, for each dataset, how often it has each of those pairs that occur several times in the file.

    >>> count_repeated([["a", "b"], ["b"], ["c"]])
    [{'b': 1}, {'b': 1}, {}]
    """
    total = Counter(pair for pairs in datasets for pair in pairs)
    return [dict(Counter(pair for pair in pairs if total[pair] > 1)) for pairs in datasets]
