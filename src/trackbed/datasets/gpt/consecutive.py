"""Splits whose documents follow one another in their file, as orders without an index need them."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.datasets.low_level import check_documents, num_sequences
from trackbed.errors import ArgumentError
from trackbed.tokens import IndexedDataset, IndexedGroup


def consecutive_run(
    dataset: Any, documents: npt.NDArray[np.integer[Any]] | None, *, order: str, where: str
) -> tuple[int, int]:
    """Returns the first document of a split, and one after the last; `(0, 0)` for none.

    Args:
        dataset: the low-level dataset.
        documents: those of the split, or None for all of them.
        order: name of the order, for errors.
        where: name of the dataset and its split, for errors.

    Raises:
        ArgumentError: the dataset is not an indexed file, or the documents are not consecutive.
    """
    if not isinstance(dataset, (IndexedDataset, IndexedGroup)):
        found = type(dataset).__name__
        raise ArgumentError(f"order={order!r} cuts its samples from an IndexedDataset, found a {found}")
    if documents is None:
        run = (0, len(dataset.sequence_lengths))
    else:
        run = (int(documents[0]), int(documents[-1]) + 1) if len(documents) else (0, 0)
        if run[1] - run[0] != len(documents) or (np.diff(documents) != 1).any():
            raise ArgumentError(
                f"order={order!r} needs consecutive documents in a split, found {len(documents)} others"
            )
    check_documents(documents, run, num_sequences(dataset), where=where)
    return run
