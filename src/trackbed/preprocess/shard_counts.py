"""Counts of the shards in a list, by key, from the headers of their indices."""

from dataclasses import dataclass
from pathlib import Path

from trackbed.files.stores import is_address
from trackbed.tokens import IndexedGroup, ObjectStorageConfig, default_idx_cache
from trackbed.tokens.shard_list import read_shard_groups

__all__ = ["ShardGroupCounts", "count_shards"]


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
    found = []
    for key, pairs in read_shard_groups(path).items():
        is_stored = any(map(is_address, pairs))
        storage = ObjectStorageConfig(idx_cache or default_idx_cache()) if is_stored else None
        group = IndexedGroup.open(str(path), pairs, mmap=not is_stored, object_storage_config=storage)
        indexes = [member.index for member in group.members]
        found.append(
            ShardGroupCounts(
                key=key,
                shards=len(pairs),
                documents=sum(index.document_count - 1 for index in indexes),
                tokens=sum(index.data_bytes // index.dtype_size for index in indexes),
                dtype=indexes[0].dtype.__name__,
            )
        )
    return tuple(found)
