"""Properties of low-level datasets: identity, stamps and sizes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.tokens import IndexedDataset, IndexedGroup

__all__ = [
    "check_documents",
    "data_stamps",
    "drop_pages",
    "has_stamps",
    "identify",
    "most_tokens",
    "name_of",
    "num_documents",
    "num_sequences",
    "object_stamps",
    "reads_objects",
    "sampled_tokens",
]

_Item = TypeVar("_Item")
_MOST_TOKENS: Final = 1024


def identify(dataset: Any) -> dict[str, Any]:
    """Returns the identity of a dataset's files, or a digest of its lengths if it is not an indexed file."""
    if isinstance(dataset, (IndexedDataset, IndexedGroup)):
        return dataset.identity
    lengths = np.ascontiguousarray(dataset.sequence_lengths)
    return {"class": type(dataset).__name__, "lengths_sha256": hashlib.sha256(lengths.data).hexdigest()}


def name_of(dataset: Any, path: str | None) -> str:
    """Returns the name of a pair without its folder; of a group, those of its pairs, as a digest if they are many."""
    if not isinstance(dataset, IndexedGroup):
        return "" if path is None else str(path).rstrip("/").rpartition("/")[2]
    names = [name_of(member, member.path_prefix) for member in dataset.members]
    text = ", ".join(names)
    return text if len(names) <= 4 else f"{len(names)} pairs, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def sampled_tokens(dataset: Any) -> str | None:
    """Returns a digest of the beginnings of some sequences; None if there are none, or they lie in objects."""
    pairs = dataset.members if isinstance(dataset, IndexedGroup) else [dataset]
    if not all(isinstance(pair, IndexedDataset) and not pair.is_stored for pair in pairs):
        return None
    found = hashlib.sha256()
    for pair in _first_middle_last(pairs):
        for number in _first_middle_last(range(len(pair))):
            _, size, _ = pair.index[number]
            tokens = pair.get(number, 0, min(_MOST_TOKENS, int(size)))
            found.update(np.ascontiguousarray(tokens[0] if isinstance(tokens, tuple) else tokens).tobytes())
    return found.hexdigest()[:32]


def _first_middle_last(items: Sequence[_Item]) -> list[_Item]:
    return [items[number] for number in sorted({0, len(items) // 2, len(items) - 1})] if items else []


def has_stamps(dataset: Any) -> bool:
    """True if `data_stamps` returns stamps for this dataset."""
    return isinstance(dataset, (IndexedDataset, IndexedGroup))


def data_stamps(dataset: Any) -> str | None:
    """Returns inode, size and times of its `.idx` files when they were opened, as text; None if it has none."""
    if isinstance(dataset, IndexedDataset):
        return _stamps_of(dataset)
    if isinstance(dataset, IndexedGroup):
        return hashlib.sha256(";".join(map(_stamps_of, dataset.members)).encode()).hexdigest()
    return None


def _stamps_of(pair: IndexedDataset) -> str:
    return " ".join(map(str, (*pair.index.ends.stamp, pair.index.ends.changed_ns)))


def object_stamps(dataset: Any) -> str | None:
    """Returns a digest of the stamps of its objects; None if some of its data lies in files."""
    pairs = dataset.members if isinstance(dataset, IndexedGroup) else [dataset]
    if not all(isinstance(pair, IndexedDataset) and pair.is_stored for pair in pairs):
        return None
    found = [[*pair.index.ends.stamp, *pair.bin_stamp] for pair in pairs]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32]


def reads_objects(dataset: Any) -> bool:
    """True if a dataset, or one that it blends, has a pair in an object store."""
    members = getattr(dataset, "datasets", None)
    if isinstance(members, Sequence):
        return any(map(reads_objects, members))
    low_level = getattr(dataset, "dataset", None)
    pairs = low_level.members if isinstance(low_level, IndexedGroup) else [low_level]
    return any(isinstance(pair, IndexedDataset) and pair.is_stored for pair in pairs)


def most_tokens(dataset: Any) -> int | None:
    """Returns the number of tokens that fit in the size of its `.bin`; None if it has no such file."""
    if isinstance(dataset, (IndexedDataset, IndexedGroup)):
        return int(dataset.identity["bin_bytes"]) // dataset.index.dtype_size
    return None


def drop_pages(dataset: Any) -> None:
    """Drops the pages of a mapped `.idx` from memory; they are read again on the next access."""
    if isinstance(dataset, IndexedDataset):
        dataset.index.drop_pages()


def num_sequences(dataset: Any) -> int:
    """Returns the number of sequences. Does not map an indexed file."""
    if isinstance(dataset, (IndexedDataset, IndexedGroup)):
        return len(dataset)
    return len(dataset.sequence_lengths)


def num_documents(dataset: Any) -> int:
    """Returns the number of documents. Does not map an indexed file."""
    pairs = dataset.members if isinstance(dataset, IndexedGroup) else [dataset]
    if all(isinstance(pair, IndexedDataset) for pair in pairs):
        return sum(pair.index.document_count - 1 for pair in pairs)
    return len(dataset.document_indices) - 1


def check_documents(
    documents: npt.NDArray[np.integer[Any]] | None, run: tuple[int, int] | None, dataset: Any, *, where: str
) -> None:
    """Raises ArgumentError unless all documents of a split are in the low-level dataset.

    Args:
        documents: their numbers; None for all.
        run: the first one and the one after the last if they are consecutive, else None.
        dataset: the low-level dataset.
        where: name of the dataset and its split, for the error.
    """
    if documents is None or len(documents) == 0:
        return
    lowest, highest = (run[0], run[1] - 1) if run is not None else (int(documents.min()), int(documents.max()))
    count = num_sequences(dataset)
    if lowest < 0 or highest >= count:
        msg = f"{where}: documents must be in [0, {count}), found {lowest if lowest < 0 else highest}"
        raise ArgumentError(msg)
