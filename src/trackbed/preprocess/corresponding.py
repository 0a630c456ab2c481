"""Documents of several keys of one record: the files of all keys have the same records, in the same order.

Shapes: D documents of a key, N sequences of them, T tokens of all.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


class Documents(NamedTuple):
    """Documents of one key."""

    tokens: npt.NDArray[Any]
    """`[T]` tokens of all sequences."""
    lengths: Counts
    """`[N]` tokens in each sequence."""
    counts: Counts
    """`[D]` sequences in each document."""


def without_tokens(documents: Documents) -> npt.NDArray[np.bool_]:
    """Returns `[D]` flags: True for a document without tokens.

    >>> without_tokens(Documents(np.arange(3), np.array([1, 0, 0, 2]), np.array([2, 0, 1, 1])))
    array([False,  True,  True, False])
    """
    tokens_before = _sums(documents.lengths)
    is_empty: npt.NDArray[np.bool_] = np.diff(tokens_before[_sums(documents.counts)]) == 0
    return is_empty


def leave_out(keys: Sequence[Documents], records: npt.NDArray[np.bool_]) -> list[Documents]:
    """Returns the documents of each key without those of the records that are marked.

    Args:
        keys: documents of each key, D each.
        records: `[D]` True for a record to leave out.
    """
    found = []
    for tokens, lengths, counts in keys:
        is_kept_sequence = np.repeat(~records, counts)
        is_kept_token = np.repeat(is_kept_sequence, lengths)
        found.append(Documents(tokens[is_kept_token], lengths[is_kept_sequence], counts[~records]))
    return found


def fill_empty(lengths: Counts, counts: Counts) -> tuple[Counts, Counts]:
    """Returns lengths and counts in which each document without sequences has one of length 0.

    >>> fill_empty(np.array([4, 5]), np.array([0, 2, 0]))
    (array([0, 4, 5, 0]), array([1, 2, 1]))
    """
    is_empty = counts == 0
    places = np.cumsum(counts, dtype=np.int64)[is_empty]
    return np.insert(lengths, places, 0), np.where(is_empty, 1, counts)


def _sums(numbers: Counts) -> Counts:
    return np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])
