"""What tells one low-level dataset from another."""

import hashlib
from typing import Any

import numpy as np

from trackbed.tokens import IndexedDataset, IndexedGroup

__all__ = ["data_stamps", "drop_pages", "has_stamps", "identify", "most_tokens", "num_sequences"]


def identify(dataset: Any) -> dict[str, Any]:
    """The identity of its files, or of its lengths where it has none."""
    if isinstance(dataset, (IndexedDataset, IndexedGroup)):
        return dataset.identity
    lengths = np.ascontiguousarray(dataset.sequence_lengths)
    return {"class": type(dataset).__name__, "lengths_sha256": hashlib.sha256(lengths.data).hexdigest()}


def has_stamps(dataset: Any) -> bool:
    """True if `data_stamps` gives the stamps of its files."""
    return isinstance(dataset, (IndexedDataset, IndexedGroup))


def data_stamps(dataset: Any) -> str | None:
    """Inode, size and times of its index files when they were opened, as text; None where it has none."""
    if isinstance(dataset, IndexedDataset):
        return _stamps_of(dataset)
    if isinstance(dataset, IndexedGroup):
        return hashlib.sha256(";".join(map(_stamps_of, dataset.members)).encode()).hexdigest()
    return None


def _stamps_of(pair: IndexedDataset) -> str:
    return " ".join(map(str, (*pair.index.ends.stamp, pair.index.ends.changed_ns)))


def most_tokens(dataset: Any) -> int | None:
    """Tokens that its `.bin` has room for, or None where it has none."""
    if isinstance(dataset, (IndexedDataset, IndexedGroup)):
        return int(dataset.identity["bin_bytes"]) // dataset.index.dtype_size
    return None


def drop_pages(dataset: Any) -> None:
    """Give back the memory of what was read of its index, where that can be read again."""
    if isinstance(dataset, IndexedDataset):
        dataset.index.drop_pages()


def num_sequences(dataset: Any) -> int:
    """Sequences in it; an indexed file need not be mapped for that."""
    if isinstance(dataset, (IndexedDataset, IndexedGroup)):
        return len(dataset)
    return len(dataset.sequence_lengths)
