"""Indexed token files as datasets of torch."""

from typing import Any

import torch.utils.data

from trackbed import tokens

__all__ = ["IndexedDataset", "is_plain", "reads_in_rounds"]


class IndexedDataset(tokens.IndexedDataset, torch.utils.data.Dataset[Any]):
    """A `.bin`/`.idx` pair as a dataset of torch. See `trackbed.tokens.IndexedDataset`."""


def is_plain(pair: object) -> bool:
    """True for a pair whose class is ours: others may override how they read."""
    return type(pair) in (IndexedDataset, tokens.IndexedDataset)


def reads_in_rounds(dataset: Any) -> bool:
    """True for a pair in an object store or a group, of our classes: `get_several` reads it in one round."""
    return dataset.is_stored if is_plain(dataset) else type(dataset) is tokens.IndexedGroup
