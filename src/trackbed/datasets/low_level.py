"""What tells one low-level dataset from another."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.tokens import IndexedDataset, IndexedGroup, read_lengths

__all__ = ["first_lengths", "identify", "let_go", "most_tokens", "num_sequences"]


def identify(dataset: Any) -> dict[str, Any]:
    """The identity of its files, or of its lengths where it has none."""
    if isinstance(dataset, (IndexedDataset, IndexedGroup)):
        return dataset.identity
    lengths = np.ascontiguousarray(dataset.sequence_lengths)
    return {"class": type(dataset).__name__, "lengths_sha256": hashlib.sha256(lengths.data).hexdigest()}


def most_tokens(dataset: Any) -> int | None:
    """Tokens that its `.bin` has room for, or None where it has none."""
    if isinstance(dataset, (IndexedDataset, IndexedGroup)):
        return int(dataset.identity["bin_bytes"]) // dataset.index.dtype_size
    return None


def first_lengths(datasets: Sequence[Any], stops: Sequence[int]) -> list[npt.NDArray[np.int32] | None]:
    """Of each dataset, the tokens in its sequences before `stop`, if not in more. Pairs are not mapped for that.

    None of a pair whose files were replaced since they were opened.
    """
    pairs = [(one.index, stop) for one, stop in zip(datasets, stops, strict=True) if isinstance(one, IndexedDataset)]
    read = iter(read_lengths([index for index, _ in pairs], [stop for _, stop in pairs]))
    return [next(read) if isinstance(one, IndexedDataset) else one.sequence_lengths for one in datasets]


def let_go(dataset: Any) -> None:
    """Give back the memory of what was read of its index, where that can be read again."""
    if isinstance(dataset, IndexedDataset):
        dataset.index.let_go()


def num_sequences(dataset: Any) -> int:
    """Sequences in it; an indexed file need not be mapped for that."""
    if isinstance(dataset, (IndexedDataset, IndexedGroup)):
        return len(dataset)
    return len(dataset.sequence_lengths)
