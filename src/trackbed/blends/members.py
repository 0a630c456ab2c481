"""Lookup of the datasets that a blend file names, of their sizes, and of pairs that it names several times.

Reads only the headers and single entries of the `.idx` files.

Shapes: N names of pairs.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from glob import glob, has_magic
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from trackbed.blends.blend_file import DatasetEntry
from trackbed.blends.toml_tables import Problems, reason_of
from trackbed.errors import ArgumentError, FormatError, StoreError
from trackbed.files import read_index_ends, read_stamps
from trackbed.files.stores import is_address, parse_address
from trackbed.files.stores.waiting import call_all
from trackbed.index.splits import Bounds, Split, split_range
from trackbed.tokens import IndexedDataset, IndexedGroup, ObjectStorageConfig
from trackbed.tokens.commit import interruption
from trackbed.tokens.format import PairHeader
from trackbed.tokens.paths import get_bin_path, get_idx_path
from trackbed.tokens.read_headers import read_headers
from trackbed.tokens.stored.open_pairs import match_objects

_COMPARING_THREADS: Final = 8  # on a network file system each waits for an answer


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
    stamps = read_stamps([get_bin_path(path) for path in files], num_threads=_COMPARING_THREADS).tolist()
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
    ids: list[Hashable] = []
    for path, ends in zip(paths, read_index_ends([get_idx_path(one) for one in paths]), strict=True):
        try:
            status = os.stat(get_bin_path(path))  # noqa: PTH116  the device, which stamps lack
        except OSError:
            ids.append(path)
            continue
        index = str(ends) if isinstance(ends, OSError) else (ends.stamp[1], bytes(ends.ends))
        ids.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, index))
    return ids


def refuse_repeats(pairs: Iterable[NamedPair], problems: Problems) -> None:
    """Adds a problem for each dataset that repeats pairs of a split, unless it says that it does.

    Args:
        pairs: all names of pairs, in the order of the file.
        problems: receives the problems, each with the places of both names.
    """
    earlier: defaultdict[Hashable, list[NamedPair]] = defaultdict(list)
    repeats = []
    for pair in pairs:
        first = next((other for other in earlier[pair.pair] if _share_a_split(pair.entry, other.entry)), None)
        if first is not None and not pair.entry.repeated:
            repeats.append((pair, first))
        earlier[pair.pair].append(pair)
    for _, some in groupby(repeats, key=lambda found: (found[0].entry.where, found[1].entry.where)):
        (pair, first), *others = some
        more = f", and {len(others)} more pairs of it" if len(others) > 1 else ", and one more" if others else ""
        is_within = pair.entry is first.entry
        place = (
            "this dataset" if is_within else problems.place_of((*first.entry.where, first.entry.kind), first.entry.name)
        )
        problems.add(
            (*pair.entry.where, pair.entry.kind),
            f"must name each pair of a split once, found {pair.prefix}, which is {_shown(first, pair)} of "
            f"{place}{more}; `repeated = true` in its [[dataset]] says that it is meant",
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


_THREADS: Final = 4  # they wait for the file system; on a fast one, more threads only contend
_THREADS_FOR_STORES: Final = 16


class _Opener(NamedTuple):
    """Options and headers for opening pairs in object stores."""

    storage: ObjectStorageConfig | None
    headers: Mapping[str, PairHeader]
    """Headers that were read together, by prefix."""

    def open(self, entry: DatasetEntry, prefix: str, pairs: tuple[str, ...]) -> IndexedDataset | IndexedGroup:
        """Opens a dataset."""
        is_mapped = not any(map(is_address, pairs))
        options: dict[str, Any] = {"mmap": is_mapped, "object_storage_config": None if is_mapped else self.storage}
        if entry.kind == "group":
            return IndexedGroup.open(prefix, pairs, headers=self.headers, **options)
        return IndexedDataset(prefix, open_when_read=True, header=self.headers.get(prefix), **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One dataset of a blend: a pair, or a group of pairs."""

    name: str
    """Name of its entry; for a dataset of a glob, the last part of its prefix."""
    prefix: str
    """Name in the configuration."""
    pairs: tuple[str, ...]
    entry: DatasetEntry
    split_documents: tuple[int | None, int | None, int | None]
    """Documents of its part of each split, estimated from the share of its sequences if documents have several; None
    for a split that it is not in."""
    tokens: int
    split_ranges: tuple[tuple[int, int] | None, ...]
    """First sequence of its part of each split, and the one after the last; None for a split that it is not in."""
    reopen: Callable[[], IndexedDataset | IndexedGroup] = field(repr=False, compare=False)
    """Opens it."""
    split_tokens: tuple[int | None, int | None, int | None]
    """Tokens of its part of each split; None for a split that it is not in."""
    part: float
    """Its fraction of the entry's weight: 1, or less for a dataset of a glob."""
    repeated: Mapping[Hashable, int] = field(default_factory=dict, repr=False, compare=False)
    """Number of times that it has each of those pairs that occur several times in the file."""


class FoundMembers(NamedTuple):
    """Datasets of a blend file, and what was read to measure them."""

    members: tuple[Member, ...]
    headers: Mapping[str, PairHeader]
    """Headers of the pairs in object stores, by prefix."""


def find_members(
    entries: Sequence[DatasetEntry],
    bounds: Sequence[Bounds | None],
    problems: Problems,
    *,
    storage: ObjectStorageConfig | None = None,
) -> FoundMembers:
    """Finds and measures the datasets that the entries stand for, in order.

    Args:
        entries: entries of the file.
        bounds: for each split, its range of every dataset.
        problems: receives missing and damaged datasets.
        storage: options for pairs in object stores; needed if there are any.
    """
    datasets = [(entry, prefix, pairs) for entry in entries for prefix, pairs in _pairs_of(entry, problems)]
    repeated = _find_repeats(datasets, problems)
    stored = [pair for _, _, pairs in datasets for pair in pairs if is_address(pair)]
    opener = _Opener(storage, read_headers(stored, idx_cache=storage.path_to_idx_cache) if storage else {})
    measured = call_all(
        [partial(_try_measure, opener, *dataset, bounds=bounds) for dataset in datasets],
        num_threads=_THREADS if storage is None else _THREADS_FOR_STORES,
    )
    for (entry, _, _), one in zip(datasets, measured, strict=True):
        if isinstance(one, Exception):
            problems.add((*entry.where, entry.kind), f"names {reason_of(one)}")
    members = [
        replace(one, repeated=counts) if counts else one
        for one, counts in zip(measured, repeated, strict=True)
        if isinstance(one, Member)
    ]
    return FoundMembers(_with_parts(members), opener.headers)


def _find_repeats(
    datasets: Sequence[tuple[DatasetEntry, str, tuple[str, ...]]], problems: Problems
) -> list[dict[Hashable, int]]:
    """Refuses repeated pairs where nothing says that they are meant; see `count_repeated`."""
    names = [(entry, pair) for entry, _, pairs in datasets for pair in pairs]
    ids = pair_ids([pair for _, pair in names])
    refuse_repeats([NamedPair(entry, pair, one) for (entry, pair), one in zip(names, ids, strict=True)], problems)
    left = iter(ids)
    return count_repeated([list(islice(left, len(pairs))) for _, _, pairs in datasets])


def _pairs_of(entry: DatasetEntry, problems: Problems) -> list[tuple[str, tuple[str, ...]]]:
    """Returns prefix and pairs of each dataset that an entry stands for."""
    pairs: list[str] = []
    for number, pattern in enumerate(entry.patterns):
        prefix = pattern.removesuffix(".bin").removesuffix(".idx")
        if entry.kind == "path" or not has_magic(prefix):
            pairs.append(prefix)
            continue
        found, halves = _match(prefix)
        key = (*entry.where, entry.kind, number) if entry.kind == "group" else (*entry.where, entry.kind)
        for half in halves if entry.incomplete == "error" else []:
            problems.add(key, _why_incomplete(half))
        if not found and (not halves or entry.incomplete == "skip"):
            problems.add(key, _why_no_match(pattern))
        pairs += found
    if entry.kind == "group":
        return [(_name_of_group(entry), tuple(pairs))]
    return [(pair, (pair,)) for pair in dict.fromkeys(pairs)]


def _match(pattern: str) -> tuple[list[str], list[str]]:
    """Returns the sorted prefixes of the pairs that a pattern matches, and the files without their other half."""
    match = match_objects if is_address(pattern) else glob
    indices, data = (match(f"{pattern}{suffix}") for suffix in (".idx", ".bin"))
    with_data = {path.removesuffix(".bin") for path in data}
    with_index = {path.removesuffix(".idx") for path in indices}
    halves = [path for path in indices if path.removesuffix(".idx") not in with_data]
    halves += [path for path in data if path.removesuffix(".bin") not in with_index]
    whole = [path.removesuffix(".idx") for path in sorted(indices)]
    return [prefix for prefix in whole if prefix in with_data], sorted(halves)


def _why_incomplete(half: str) -> str:
    other = ".bin" if half.endswith(".idx") else ".idx"
    hint = ("" if is_address(half) else interruption(half[: -len(other)])) or '; incomplete = "skip" ignores such files'
    return f"must match complete pairs, found {half} without its {other}{hint}"


def _why_no_match(pattern: str) -> str:
    """Says why a pattern matches nothing: a folder that cannot be read has no matches either."""
    folder = Path(pattern).parent
    if not is_address(pattern) and not has_magic(str(folder)):
        try:
            os.listdir(folder)  # noqa: PTH208  the error is all that is wanted
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            return f"names {reason_of(error)}"
    return f"must match at least one .idx file, found none for {pattern}"


def _name_of_group(entry: DatasetEntry) -> str:
    """Returns the prefix of a group: its name, in the folder of its first pair."""
    folder, separator, _ = entry.patterns[0].rpartition("/")
    return f"{folder}{separator}{entry.name}"


def _try_measure(
    opener: _Opener, entry: DatasetEntry, prefix: str, pairs: tuple[str, ...], *, bounds: Sequence[Bounds | None]
) -> Member | Exception:
    """Returns the dataset, or its error, so that the errors of all datasets can be reported."""
    try:
        return _measure(opener, entry, prefix, pairs, bounds)
    except (ArgumentError, FormatError, StoreError, OSError) as error:
        return error


def _measure(
    opener: _Opener, entry: DatasetEntry, prefix: str, pairs: tuple[str, ...], bounds: Sequence[Bounds | None]
) -> Member:
    dataset = opener.open(entry, prefix, pairs)

    ranges = [
        None
        if (part := bounds[split.value]) is None or (entry.splits is not None and split not in entry.splits)
        else split_range(part, len(dataset))
        for split in Split
    ]
    documents = dataset.index.document_count - 1

    def tokens_in(span: tuple[int, int] | None) -> int | None:
        return None if span is None else _tokens_before(dataset, span[1]) - _tokens_before(dataset, span[0])

    def documents_in(span: tuple[int, int] | None) -> int | None:
        return None if span is None else round(documents * (span[1] - span[0]) / max(len(dataset), 1))

    return Member(
        name=entry.name if entry.kind != "glob" else prefix.rpartition("/")[2],
        prefix=prefix,
        pairs=pairs,
        entry=entry,
        split_documents=(documents_in(ranges[0]), documents_in(ranges[1]), documents_in(ranges[2])),
        tokens=_tokens_before(dataset, len(dataset)),
        split_ranges=tuple(ranges),
        reopen=partial(opener.open, entry, prefix, pairs),
        split_tokens=(tokens_in(ranges[0]), tokens_in(ranges[1]), tokens_in(ranges[2])),
        part=1.0,
    )


def _tokens_before(dataset: IndexedDataset | IndexedGroup, sequence: int) -> int:
    """Returns the tokens before a sequence in `[0, len]`: one lookup, as sequences are contiguous."""
    index = dataset.index
    if sequence == 0:
        return 0  # a lookup would map the file
    end = index.data_bytes if sequence == len(dataset) else int(index.sequence_pointers[sequence])
    if not 0 <= end <= index.data_bytes:
        raise FormatError(
            f"{dataset.path_prefix}: sequence {sequence} must begin in [0, {index.data_bytes}], found {end}"
        )
    return end // index.dtype_size


def _with_parts(members: Sequence[Member]) -> tuple[Member, ...]:
    """Returns the members with their fractions of the weights of their entries."""
    totals: dict[Any, tuple[int, int]] = {}
    for member in members:
        tokens, count = totals.get(member.entry.where, (0, 0))
        totals[member.entry.where] = (tokens + member.tokens, count + 1)
    return tuple(replace(member, part=_part(member, *totals[member.entry.where])) for member in members)


def _part(member: Member, tokens: int, count: int) -> float:
    if count == 1:
        return 1.0
    return member.tokens / tokens if member.entry.divide == "tokens" and tokens else 1 / count
