"""Lookup of the datasets that a blend file names, and of their sizes.

Reads only the headers and single entries of the `.idx` files.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Final

from trackbed.builder.blend_file.description import DatasetEntry
from trackbed.builder.blend_file.tables import Problems
from trackbed.errors import ArgumentError, FormatError
from trackbed.index.splits import Bounds, Split, split_range
from trackbed.tokens import IndexedDataset, IndexedGroup
from trackbed.tokens.commit import interruption

__all__ = ["Member", "find_members"]

_THREADS: Final = 4  # they wait for the file system; on a fast one, more threads only contend


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One dataset of a blend: a pair, or a group of pairs."""

    name: str
    """Name of its entry; for a dataset of a glob, the last part of its prefix."""
    prefix: str
    """Name in the configuration."""
    pairs: tuple[str, ...]
    entry: DatasetEntry
    documents: int
    tokens: int
    split_tokens: tuple[int | None, int | None, int | None]
    """Tokens of its part of each split; None for a split that it is not in."""
    part: float
    """Its fraction of the entry's weight: 1, or less for a dataset of a glob."""


def find_members(
    entries: Sequence[DatasetEntry], bounds: Sequence[Bounds | None], problems: Problems
) -> tuple[Member, ...]:
    """Finds and measures the datasets that the entries stand for, in order.

    Args:
        entries: entries of the file.
        bounds: for each split, its range of every dataset.
        problems: receives missing and damaged datasets.
    """
    found = [(entry, prefix, pairs) for entry in entries for prefix, pairs in _pairs_of(entry, problems)]
    with ThreadPoolExecutor(_THREADS) as pool:
        measured = list(pool.map(lambda dataset: _try_measure(*dataset, bounds=bounds), found))
    for (entry, _, _), one in zip(found, measured, strict=True):
        if isinstance(one, Exception):
            problems.add((*entry.where, entry.kind), f"names {one}")
    return _with_parts([one for one in measured if isinstance(one, Member)])


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
            problems.add(key, f"must match at least one .idx file, found none for {pattern}")
        pairs += found
    if entry.kind == "group":
        return [(_name_of_group(entry), tuple(pairs))]
    return [(pair, (pair,)) for pair in dict.fromkeys(pairs)]


def _match(pattern: str) -> tuple[list[str], list[Path]]:
    """Returns the sorted prefixes of the pairs that a pattern matches, and the files without their other half."""
    indices, data = (glob(f"{pattern}{suffix}") for suffix in (".idx", ".bin"))  # noqa: PTH207  may be absolute
    with_data = {path.removesuffix(".bin") for path in data}
    with_index = {path.removesuffix(".idx") for path in indices}
    halves = [Path(path) for path in indices if path.removesuffix(".idx") not in with_data]
    halves += [Path(path) for path in data if path.removesuffix(".bin") not in with_index]
    whole = [path.removesuffix(".idx") for path in sorted(indices)]
    return [prefix for prefix in whole if prefix in with_data], sorted(halves)


def _why_incomplete(half: Path) -> str:
    other = ".bin" if half.suffix == ".idx" else ".idx"
    hint = interruption(str(half.with_suffix(""))) or '; incomplete = "skip" ignores such files'
    return f"must match complete pairs, found {half} without its {other}{hint}"


def _name_of_group(entry: DatasetEntry) -> str:
    """Returns the prefix of a group: its name, in the folder of its first pair."""
    folder, separator, _ = entry.patterns[0].rpartition("/")
    return f"{folder}{separator}{entry.name}"


def _try_measure(
    entry: DatasetEntry, prefix: str, pairs: tuple[str, ...], *, bounds: Sequence[Bounds | None]
) -> Member | Exception:
    """Returns the dataset, or its error, so that the errors of all datasets can be reported."""
    try:
        return _measure(entry, prefix, pairs, bounds)
    except (ArgumentError, FormatError, OSError) as error:
        return error


def _measure(entry: DatasetEntry, prefix: str, pairs: tuple[str, ...], bounds: Sequence[Bounds | None]) -> Member:
    is_group = entry.kind == "group"
    dataset = IndexedGroup.open(prefix, pairs) if is_group else IndexedDataset(prefix, open_when_read=True)

    def in_split(split: Split) -> int | None:
        part = bounds[split.value]
        if part is None or (entry.splits is not None and split not in entry.splits):
            return None
        start, stop = split_range(part, len(dataset))
        return _tokens_before(dataset, stop) - _tokens_before(dataset, start)

    return Member(
        name=entry.name if entry.kind != "glob" else prefix.rpartition("/")[2],
        prefix=prefix,
        pairs=pairs,
        entry=entry,
        documents=dataset.index.document_count - 1,
        tokens=_tokens_before(dataset, len(dataset)),
        split_tokens=(in_split(Split.train), in_split(Split.valid), in_split(Split.test)),
        part=1.0,
    )


def _tokens_before(dataset: IndexedDataset | IndexedGroup, sequence: int) -> int:
    """Returns the tokens before a sequence in `[0, len]`: one lookup, as sequences are contiguous."""
    index = dataset.index
    if sequence == 0:
        return 0  # a lookup would map the file
    end = index.data_bytes if sequence == len(dataset) else int(index.sequence_pointers[sequence])
    if not 0 <= end <= index.data_bytes:
        msg = f"{dataset.path_prefix}: sequence {sequence} must begin in [0, {index.data_bytes}], found {end}"
        raise FormatError(msg)
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
