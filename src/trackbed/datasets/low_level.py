"""Low-level datasets: pairs as datasets of torch, how they are opened, their identity, stamps and sizes."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch.utils.data

from trackbed import tokens
from trackbed.datasets.config import BlendedMegatronDatasetConfig, check_stored, storage_of
from trackbed.datasets.start import current_start
from trackbed.errors import ArgumentError, FormatError
from trackbed.files.stores import is_address
from trackbed.tokens.trained_tokens import TrainedTokens

_Item = TypeVar("_Item")
_MOST_TOKENS: Final = 1024


class IndexedDataset(tokens.IndexedDataset, torch.utils.data.Dataset[Any]):
    """A `.bin`/`.idx` pair as a dataset of torch. See `trackbed.tokens.IndexedDataset`."""


def is_plain(pair: object) -> bool:
    """True for a pair whose class is ours: others may override how they read."""
    return type(pair) in (IndexedDataset, tokens.IndexedDataset)


def reads_in_rounds(dataset: Any) -> bool:
    """True for a pair in an object store or a group, of our classes: `get_several` reads it in one round."""
    return dataset.is_stored if is_plain(dataset) else type(dataset) is tokens.IndexedGroup


def open_group(prefix: str, config: BlendedMegatronDatasetConfig) -> tokens.IndexedGroup | None:
    """Opens the group of pairs that a configuration lists for a prefix; None if it lists none."""
    pairs = (config.groups or {}).get(prefix)
    if pairs is None:
        return None
    for pair in pairs:
        check_stored(pair, config)
    storage = storage_of(config)
    start = current_start()
    if start is not None and storage is not None:
        start.read_headers(filter(is_address, pairs), idx_cache=storage.path_to_idx_cache)
    group = tokens.IndexedGroup.open(
        prefix,
        pairs,
        mmap=config.mmap_bin_files,
        object_storage_config=storage,
        pair_class=IndexedDataset,
        headers=None if start is None else start.stored_headers,
    )
    _check_type(group)
    return group


def open_pair(prefix: str, config: BlendedMegatronDatasetConfig, **options: Any) -> IndexedDataset:
    """Opens the pair at a prefix; its files are mapped when they are first read. `options` are of `IndexedDataset`."""
    check_stored(prefix, config)
    options = {"mmap": config.mmap_bin_files, "object_storage_config": storage_of(config), **options}
    start = current_start()
    header = None if start is None else start.header(prefix)
    pair = IndexedDataset(prefix, open_when_read=True, header=header, **options)
    _check_type(pair)
    return pair


def _check_type(dataset: IndexedDataset | tokens.IndexedGroup) -> None:
    """Raises FormatError unless the tokens are integers."""
    dtype = np.dtype(dataset.index.dtype)
    if dtype.kind not in "iu":
        raise FormatError(f"{dataset.path_prefix}: tokens must be integers, found {dtype}")


def trained_tokens(pair: IndexedDataset | tokens.IndexedDataset) -> TrainedTokens | None:
    """Returns which tokens of a pair's documents are trained; None if all are.

    Raises:
        FormatError: its mask is damaged, or of documents of several sequences.
    """
    storage = pair.object_storage_config
    found = TrainedTokens.open(pair.path_prefix, idx_cache=None if storage is None else storage.path_to_idx_cache)
    if found is not None and len(found) != len(pair):
        raise FormatError(
            f"{pair.path_prefix}: each of {len(found)} documents with a mask must be one sequence, found {len(pair)}"
        )
    return found


def identify(dataset: Any) -> dict[str, Any]:
    """Returns the identity of a dataset's files, or a digest of its lengths if it is not an indexed file."""
    if isinstance(dataset, (tokens.IndexedDataset, tokens.IndexedGroup)):
        return dataset.identity
    lengths = np.ascontiguousarray(dataset.sequence_lengths)
    return {"class": type(dataset).__name__, "lengths_sha256": hashlib.sha256(lengths.data).hexdigest()}


def name_of(dataset: Any, path: str | None) -> str:
    """Returns the name of a pair without its folder; of a group, the names of its pairs, or their digest."""
    if not isinstance(dataset, tokens.IndexedGroup):
        return "" if path is None else str(path).rstrip("/").rpartition("/")[2]
    names = [name_of(member, member.path_prefix) for member in dataset.members]
    text = ", ".join(names)
    return text if len(names) <= 4 else f"{len(names)} pairs, SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def sampled_tokens(dataset: Any) -> str | None:
    """Returns a digest of the beginnings of some sequences; None if there are none, or they lie in objects."""
    pairs = dataset.members if isinstance(dataset, tokens.IndexedGroup) else [dataset]
    if not all(isinstance(pair, tokens.IndexedDataset) and not pair.is_stored for pair in pairs):
        return None
    found = hashlib.sha256()
    for pair in _first_middle_last(pairs):
        for number in _first_middle_last(range(len(pair))):
            _, size, _ = pair.index[number]
            piece = pair.get(number, 0, min(_MOST_TOKENS, int(size)))
            found.update(np.ascontiguousarray(piece[0] if isinstance(piece, tuple) else piece).tobytes())
    return found.hexdigest()[:32]


def _first_middle_last(items: Sequence[_Item]) -> list[_Item]:
    return [items[number] for number in sorted({0, len(items) // 2, len(items) - 1})] if items else []


def has_stamps(dataset: Any) -> bool:
    """True if `data_stamps` returns stamps for this dataset."""
    return isinstance(dataset, (tokens.IndexedDataset, tokens.IndexedGroup))


def data_stamps(dataset: Any) -> str | None:
    """Returns inode, size and times of its `.idx` files when they were opened, as text; None if it has none."""
    if isinstance(dataset, tokens.IndexedDataset):
        return _stamps_of(dataset)
    if isinstance(dataset, tokens.IndexedGroup):
        return hashlib.sha256(";".join(map(_stamps_of, dataset.members)).encode()).hexdigest()
    return None


def _stamps_of(pair: tokens.IndexedDataset) -> str:
    return " ".join(map(str, (*pair.index.ends.stamp, pair.index.ends.changed_ns)))


def object_stamps(dataset: Any) -> str | None:
    """Returns a digest of the stamps of its objects; None if some of its data lies in files."""
    pairs = dataset.members if isinstance(dataset, tokens.IndexedGroup) else [dataset]
    if not all(isinstance(pair, tokens.IndexedDataset) and pair.is_stored for pair in pairs):
        return None
    found = [[*pair.index.ends.stamp, *pair.bin_stamp] for pair in pairs]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32]


def reads_objects(dataset: Any) -> bool:
    """True if a dataset, or one that it blends, has a pair in an object store."""
    members = getattr(dataset, "datasets", None)
    if isinstance(members, Sequence):
        return any(map(reads_objects, members))
    low_level = getattr(dataset, "dataset", None)
    pairs = low_level.members if isinstance(low_level, tokens.IndexedGroup) else [low_level]
    return any(isinstance(pair, tokens.IndexedDataset) and pair.is_stored for pair in pairs)


def most_tokens(dataset: Any) -> int | None:
    """Returns the number of tokens that fit in the size of its `.bin`; None if it has no such file."""
    if isinstance(dataset, (tokens.IndexedDataset, tokens.IndexedGroup)):
        return int(dataset.identity["bin_bytes"]) // dataset.index.dtype_size
    return None


def drop_pages(dataset: Any) -> None:
    """Drops the pages of a mapped `.idx` from memory; they are read again on the next access."""
    if isinstance(dataset, tokens.IndexedDataset):
        dataset.index.drop_pages()


def num_sequences(dataset: Any) -> int:
    """Returns the number of sequences. Does not map an indexed file."""
    if isinstance(dataset, (tokens.IndexedDataset, tokens.IndexedGroup)):
        return len(dataset)
    return len(dataset.sequence_lengths)


def num_documents(dataset: Any) -> int:
    """Returns the number of documents. Does not map an indexed file."""
    pairs = dataset.members if isinstance(dataset, tokens.IndexedGroup) else [dataset]
    if all(isinstance(pair, tokens.IndexedDataset) for pair in pairs):
        return sum(pair.index.document_count - 1 for pair in pairs)
    return len(dataset.document_indices) - 1


def check_documents(
    documents: npt.NDArray[np.integer[Any]] | None, run: tuple[int, int] | None, count: int, *, where: str
) -> None:
    """Raises ArgumentError unless all documents of a split are in the low-level dataset.

    Args:
        documents: their numbers; None for all.
        run: the first one and the one after the last if they are consecutive, else None.
        count: number of documents in the low-level dataset.
        where: name of the dataset and its split, for the error.
    """
    if documents is None or len(documents) == 0:
        return
    lowest, highest = (run[0], run[1] - 1) if run is not None else (int(np.min(documents)), int(np.max(documents)))
    if lowest < 0 or highest >= count:
        raise ArgumentError(f"{where}: documents must be in [0, {count}), found {lowest if lowest < 0 else highest}")
