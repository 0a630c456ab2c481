"""The document index: the order in which documents are visited.

Shapes: D documents of the split, E epochs, V = E * D visits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.index.epochs import EpochPlan
from trackbed.index.legacy_random import LegacyShuffle
from trackbed.index.ranges import bounds_of


def document_index_dtype(documents: npt.NDArray[np.integer[Any]]) -> type[np.int32] | type[np.int64]:
    """int32 as in Megatron Core, or int64 if one of the `[D]` document numbers would overflow it."""
    bounds = bounds_of(documents)
    highest = int(documents.max()) if bounds is None else bounds[1] - 1
    return np.int32 if highest <= np.iinfo(np.int32).max else np.int64


def document_index(
    documents: npt.NDArray[np.integer[Any]],
    plan: EpochPlan,
    shuffle: LegacyShuffle,
    *,
    first: int | None = None,
    allocate: Callable[..., npt.NDArray[Any]] = np.empty,
) -> npt.NDArray[np.integer[Any]]:
    """Visits every document of the split once per epoch, all epochs shuffled together.

    A separate last epoch is shuffled on its own.

    Args:
        documents: `[D]` numbers of the split's documents.
        plan: number of epochs, and whether the last one is separate.
        shuffle: the dataset's stream of shuffles, from which nothing has been drawn yet.
        first: number of the first document if the documents are known to be consecutive, else None. Datasets of equal
            size can then share a cached shuffle.
        allocate: called with shape and dtype; returns the array to fill.

    Returns:
        `[V]` document of each visit.

    >>> from trackbed.index.epochs import plan_epochs
    >>> plan = plan_epochs(50, num_samples=14, sequence_length=10, extra_token=1, keep_partial=False)
    >>> visits = document_index(np.arange(5, 10), plan, LegacyShuffle(1234))
    >>> plan.num_epochs, len(visits), sorted(set(visits.tolist()))
    (3, 15, [5, 6, 7, 8, 9])
    """
    visits = allocate((plan.num_epochs * len(documents),), document_index_dtype(documents))
    if first is not None and plan.num_epochs == 1:
        shuffle.fill_range(visits, first)
        return visits
    visits.reshape(plan.num_epochs, len(documents))[:] = documents
    shuffle_epochs(visits, plan, shuffle)
    return visits


def shuffle_epochs(visits: npt.NDArray[np.integer[Any]], plan: EpochPlan, shuffle: LegacyShuffle) -> None:
    """Shuffle the `[V]` visits of all epochs together in place, those of a separate last epoch on their own."""
    last_epoch = 0 if plan.samples_before_last is None else len(visits) - len(visits) // plan.num_epochs
    shuffle(visits[:last_epoch])  # draws nothing if there is no separate last epoch
    shuffle(visits[last_epoch:])
