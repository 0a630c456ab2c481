"""Ring of memory for batches, reused once a batch is no longer referenced."""

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from trackbed.datasets import Batch


class Ring:
    """Pool of batches whose memory is returned automatically.

    `lend` returns views of a batch. The batch becomes free again when all of their tensors, and all views of these,
    are gone, so memory is never overwritten while any part of a batch is referenced. Thread-safe.

    Args:
        most_free: maximum number of free batches to keep.
    """

    def __init__(self, most_free: int) -> None:
        self._free: deque[Batch] = deque(maxlen=most_free)

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

    def lend(self, batch: Batch, laid_out: Batch | None = None) -> Batch:
        """Returns the batch as new tensors that view its memory, and takes ownership of `batch`.

        Tensors shared by all samples, such as an attention mask, are returned as they are.

        Args:
            batch: the memory.
            laid_out: tensors in the place of those of the batch, which view its memory unless they are `shared`.
        """
        found = batch if laid_out is None else laid_out
        lent: dict[str, torch.Tensor] = {}
        watched: list[Any] = []
        for name, tensor in found.items():
            if name in found.shared:
                lent[name] = tensor
            else:
                watched.append(tensor.numpy())  # torch holds a reference to it as long as it has a view of it
                lent[name] = torch.from_numpy(watched[-1])
        self._watch(batch, watched)
        return Batch(lent, shared=batch.shared)

    def _watch(self, batch: Batch, arrays: Iterable[Any]) -> None:
        others: deque[None] = deque()  # one entry per array but the last; `pop` is atomic
        references: list[weakref.ref[Any]] = []

        def is_gone(_: object) -> None:
            try:
                others.pop()
            except IndexError:
                references.clear()
                self._free.append(batch)

        for array in arrays:
            references.append(weakref.ref(array, is_gone))
            others.append(None)
        if others:
            others.pop()
