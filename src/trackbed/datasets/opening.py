"""Opening of the low-level datasets of a blend: pairs, or groups of pairs."""

from typing import Any

import numpy as np

from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.datasets.indexed import IndexedDataset
from trackbed.datasets.start import current_start
from trackbed.datasets.storage import check_stored, storage_of
from trackbed.errors import FormatError
from trackbed.files.stores import is_address
from trackbed.tokens import IndexedGroup

__all__ = ["open_group", "open_pair"]


def open_group(prefix: str, config: BlendedMegatronDatasetConfig) -> IndexedGroup | None:
    """Opens the group of pairs that a configuration lists for a prefix; None if it lists none.

    Raises:
        ArgumentError: a file is missing, or the pairs have tokens of several types.
        FormatError: a pair is damaged, or its tokens are not integers.
    """
    pairs = (config.groups or {}).get(prefix)
    if pairs is None:
        return None
    for pair in pairs:
        check_stored(pair, config)
    storage = storage_of(config)
    start = current_start()
    if start is not None and storage is not None:
        start.read_headers(filter(is_address, pairs), idx_cache=storage.path_to_idx_cache)
    group = IndexedGroup.open(
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
    """Opens the pair at a prefix, each of whose files is mapped when it is first read.

    Args:
        prefix: the prefix.
        config: configuration of the dataset.
        **options: further arguments of `IndexedDataset`.

    Raises:
        ArgumentError: a file is missing.
        FormatError: the pair is damaged, or its tokens are not integers.
    """
    check_stored(prefix, config)
    options = {"mmap": config.mmap_bin_files, "object_storage_config": storage_of(config), **options}
    start = current_start()
    header = None if start is None else start.header(prefix)
    pair = IndexedDataset(prefix, open_when_read=True, header=header, **options)
    _check_type(pair)
    return pair


def _check_type(dataset: IndexedDataset | IndexedGroup) -> None:
    """Raises FormatError unless the tokens are integers."""
    dtype = np.dtype(dataset.index.dtype)
    if dtype.kind not in "iu":
        msg = f"{dataset.path_prefix}: tokens must be integers, found {dtype}"
        raise FormatError(msg)
