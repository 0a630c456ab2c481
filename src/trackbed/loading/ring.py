"""Ring of memory for batches, reused once a batch is no longer referenced."""

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trackbed.datasets import Batch
from trackbed.datasets.batches.batch import as_tensors


class Ring:
    """Pool of batches whose memory is returned automatically.

    `lend` returns views of a batch. The batch becomes free again when all of their tensors, and all views of these,
    are gone, so memory is never overwritten while any part of a batch is referenced. Thread-safe.

    Args:
        most_free: maximum number of free batches to keep.
    """

    def __init__(self, most_free: int) -> None:
        self._free: deque[Batch] = deque(maxlen=most_free)
        self._watched: dict[int, list[weakref.ref[Any]]] = {}
        """References to the arrays of each batch that is lent. Without them, a collection of cycles would take them."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has no memory yet."""
        return type(self), (self._free.maxlen,)

    def take(self, size: int) -> Batch | None:
        """Takes a free batch of `size` samples, or returns None if there is none."""
        for _ in range(len(self._free)):
            try:
                batch = self._free.popleft()
            except IndexError:
                return None  # another thread has taken it
            if batch.size == size:
                return batch
            self._free.append(batch)
        return None

    def lend(self, batch: Batch, laid_out: Mapping[str, Any] | None = None) -> Batch:
        """Returns the batch as new tensors that view its memory, and takes ownership of `batch`.

        Tensors shared by all samples, such as an attention mask, are returned as they are.

        Args:
            batch: memory that a kernel writes to.
            laid_out: what is lent in the place of `batch.views()`: new arrays that view its memory, and tensors that
                do not.
        """
        found = batch.views() if laid_out is None else laid_out
        lent = as_tensors(found)
        # torch holds a reference to an array as long as it has a view of it.
        self._watch(batch, [one for one in found.values() if isinstance(one, np.ndarray)])
        return Batch(lent, shared=batch.shared)

    def _watch(self, batch: Batch, arrays: Iterable[Any]) -> None:
        others: deque[None] = deque()  # one entry per array but the last; `pop` is atomic
        references: list[weakref.ref[Any]] = []
        free, watched = self._free, self._watched

        def is_gone(_: object) -> None:
            try:
                others.pop()
            except IndexError:
                watched.pop(id(references), None)
                references.clear()
                free.append(batch)

        for array in arrays:
            references.append(weakref.ref(array, is_gone))
            others.append(None)
        if others:
            others.pop()
            watched[id(references)] = references
