"""The document index and the sample index of one dataset, computed together.

Shapes: D documents of the split, E epochs, V = E * D visits, R samples.
"""

from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.cancellation import Poll
from trackbed.errors import ArgumentError
from trackbed.index.blend import Allocate, in_memory
from trackbed.index.documents import document_index, document_index_dtype, shuffle_epochs
from trackbed.index.epochs import EpochPlan
from trackbed.index.legacy_random import LegacyShuffle
from trackbed.index.ranges import bounds_of
from trackbed.index.samples import sample_index

_MOST_PAIRS: Final = 1 << 28
"""Visits that are shuffled with their lengths: these take 8 bytes each while they are shuffled, 2 GiB at most."""


def visit_indices(
    documents: npt.NDArray[np.integer[Any]],
    lengths: npt.NDArray[np.int32],
    plan: EpochPlan,
    shuffle: LegacyShuffle,
    *,
    sequence_length: int,
    extra_token: int,
    num_threads: int = 1,
    most_pairs: int = _MOST_PAIRS,
    allocate: Allocate = in_memory,
    poll: Poll = None,
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]]]:
    """`document_index`, and `sample_index` of it, without looking up the length of each visited document.

    Documents are shuffled together with their lengths, which are then read in order. Lengths are looked up after all
    where a cached shuffle serves, where pairs would take too much memory, and where a document needs 64 bits.

    Args:
        documents: `[D]` numbers of the split's documents.
        lengths: tokens in each document of the file.
        plan: number of epochs and of samples.
        shuffle: the dataset's stream of shuffles, from which nothing has been drawn yet.
        sequence_length: tokens from one sample's start to the next, at least 1.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.
        num_threads: at least 1.
        most_pairs: visits above which lengths are looked up.
        allocate: called with name, shape and dtype; returns the array to fill for `document_index` or `sample_index`.
        poll: progress callback, called with the number of rows of the sample index done.

    Returns:
        `[V]` document of each visit, and `[R + 1, 2]` rows of the sample index.

    Raises:
        ArgumentError: a document is not in `[0, len(lengths))`.

    >>> plan = EpochPlan(num_epochs=1, num_samples=2, samples_before_last=None)
    >>> lengths = np.array([5, 9, 6, 4, 8], dtype=np.int32)
    >>> shuffle, shape = LegacyShuffle(1234), {"sequence_length": 10, "extra_token": 1}
    >>> visits, rows = visit_indices(np.arange(5), lengths, plan, shuffle, **shape)
    >>> visits.tolist(), rows.tolist()
    ([4, 0, 1, 2, 3], [[0, 0], [1, 2], [2, 7]])
    """
    first, stop = bounds_of(documents) or (None, None)
    lowest = highest = 0
    if first is not None and stop is not None:
        lowest, highest = first, stop
    elif len(documents):
        lowest, highest = int(documents.min()), int(documents.max()) + 1
    if lowest < 0 or highest > len(lengths):
        raise ArgumentError(f"documents must be in [0, {len(lengths)}), found [{lowest}, {highest})")
    num_visits = plan.num_epochs * len(documents)
    options: dict[str, Any] = {
        "sequence_length": sequence_length,
        "extra_token": extra_token,
        "num_threads": num_threads,
        "poll": poll,
    }
    is_shared = first is not None and plan.num_epochs == 1 and shuffle.is_shared(num_visits)
    if is_shared or num_visits > most_pairs or document_index_dtype(documents) is np.int64:
        found = document_index(documents, plan, shuffle, first=first, allocate=partial(allocate, "document_index"))
        in_place = partial(allocate, "sample_index")
        return found, sample_index(lengths, found, plan.num_samples, **options, allocate=in_place)
    visits = allocate("document_index", (num_visits,), np.int32)
    rows = allocate("sample_index", (plan.num_samples + 1, 2), np.int32)
    pairs = np.empty(num_visits, dtype=np.uint64)
    kernels.pair_lengths(documents, lengths[documents if first is None else slice(first, stop)], pairs)
    shuffle_epochs(pairs, plan, shuffle)
    kernels.cut_pairs(pairs, visits, rows, **options)
    return visits, rows
