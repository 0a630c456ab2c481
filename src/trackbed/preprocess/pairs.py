"""Resolution of prefixes, files and folders to pairs of indexed files, and counts of the shards in a list."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trackbed.errors import ArgumentError
from trackbed.files.stores import is_address, parse_address
from trackbed.tokens import IndexedGroup, ObjectStorageConfig, default_idx_cache, get_idx_path
from trackbed.tokens.shard_list import SHARD_LIST_SUFFIX, read_all_shards, read_shard_groups
from trackbed.tokens.stored.open_pairs import find_stored_pairs, object_exists

_SUFFIXES: Final = (".bin", ".idx")


def find_pairs(names: Iterable[str], *, exclude: str | None = None) -> list[str]:
    """Returns the prefixes that `names` stand for, in order. Does not check that the pairs exist.

    One file of a pair stands for the pair, and a list of shards for the pairs of all its keys. A folder stands for all
    pairs in it, sorted by name, except the pair with the prefix `exclude`. All of them may be addresses.

    Raises:
        ArgumentError: a folder has no pair.
        FormatError: a file that ends in `.toml` is no list of shards.
        StoreError: an object store refuses, or does not answer in time.
        OSError: a list cannot be read.
    """
    prefixes: list[str] = []
    for name in names:
        if is_address(name):
            prefixes += _stored_pairs(name)
            continue
        path = Path(name)
        if path.suffix in _SUFFIXES:
            prefixes.append(str(path.with_suffix("")))
        elif is_list_name(name):
            prefixes += read_all_shards(path)
        elif path.is_dir() and not Path(get_idx_path(name)).exists():
            prefixes += _pairs_in(path, exclude)
        else:
            prefixes.append(name)
    return prefixes


def is_list_name(name: str) -> bool:
    """True if a name is of a list of shards, and not of a pair."""
    return name.endswith(SHARD_LIST_SUFFIX) and (is_address(name) or not Path(get_idx_path(name)).exists())


def _stored_pairs(name: str) -> list[str]:
    if is_list_name(name):
        return read_all_shards(name)
    prefix = name.removesuffix(".bin").removesuffix(".idx")
    is_folder = prefix == name and (
        name.endswith("/") or not parse_address(name).key or not object_exists(parse_address(get_idx_path(name)))
    )
    return find_stored_pairs(name) if is_folder else [prefix]


def _pairs_in(folder: Path, exclude: str | None) -> list[str]:
    found = {path.with_suffix("") for path in folder.iterdir() if path.suffix in _SUFFIXES}
    if exclude is not None:
        found = {path for path in found if path.absolute() != Path(exclude).absolute()}
    if not found:
        raise ArgumentError(f"{folder}: a folder must have .bin and .idx files, found none")
    return sorted(map(str, found))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroupCounts:
    """Counts of the shards of one key."""

    key: str
    """Empty if the list has one key, which it does not name."""
    shards: int
    documents: int
    tokens: int
    dtype: str


def count_shards(path: str | Path, *, idx_cache: str | None = None) -> tuple[ShardGroupCounts, ...]:
    """Counts the shards of each key in a list, and their documents and tokens. Reads a few bytes of each index.

    Args:
        path: path or address of the list.
        idx_cache: folder of copies of `.idx` objects, for addresses; None for `default_idx_cache()`.

    Raises:
        FormatError: the file is no list of shards, or a shard is damaged.
        ArgumentError: a file of a shard is missing, or the shards of a key have different token types.
        OSError: the list cannot be read.
        StoreError: an object store refuses, or does not answer in time.
    """
    counts = []
    for key, pairs in read_shard_groups(path).items():
        is_stored = any(map(is_address, pairs))
        storage = ObjectStorageConfig(idx_cache or default_idx_cache()) if is_stored else None
        group = IndexedGroup.open(str(path), pairs, mmap=not is_stored, object_storage_config=storage)
        indexes = [member.index for member in group.members]
        counts.append(
            ShardGroupCounts(
                key=key,
                shards=len(pairs),
                documents=sum(index.document_count - 1 for index in indexes),
                tokens=sum(index.data_bytes // index.dtype_size for index in indexes),
                dtype=indexes[0].dtype.__name__,
            )
        )
    return tuple(counts)
