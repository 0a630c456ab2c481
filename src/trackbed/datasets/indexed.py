"""Indexed token files as datasets of torch."""

from typing import Any

import torch.utils.data

from trackbed import tokens

__all__ = ["IndexedDataset", "is_plain"]


class IndexedDataset(tokens.IndexedDataset, torch.utils.data.Dataset[Any]):
    """A `.bin`/`.idx` pair as a dataset of torch. See `trackbed.tokens.IndexedDataset`."""


def is_plain(pair: object) -> bool:
    """True for a pair whose class is ours: others may override how they read."""
    return type(pair) in (IndexedDataset, tokens.IndexedDataset)
