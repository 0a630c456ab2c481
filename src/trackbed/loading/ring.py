"""Memory for batches that is written again, once nobody looks at it any more."""

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from trackbed.datasets import Batch

__all__ = ["Ring"]


class Ring:
    """Batches whose memory comes back by itself.

    What is lent views that memory. It comes back when the last of its tensors, and of all that view them, is gone:
    however long somebody holds a part of a batch, it is not written to. Several threads may use it.

    Args:
        most_free: how many batches that nobody looks at are kept.
    """

    def __init__(self, most_free: int) -> None:
        self._free: deque[Batch] = deque(maxlen=most_free)

    def take(self, size: int) -> Batch | None:
        """A batch of `size` samples that nobody looks at, to be written; None where there is none."""
        for _ in range(len(self._free)):
            try:
                batch = self._free.popleft()
            except IndexError:
                return None  # another thread has taken it
            if batch.size == size:
                return batch
            self._free.append(batch)
        return None

    def lend(self, batch: Batch) -> Batch:
        """The same values, in tensors of their own. From now on `batch` belongs to the ring.

        Tensors that samples share among them, as an attention mask, are lent as they are.
        """
        lent: dict[str, torch.Tensor] = {}
        watched: list[Any] = []
        for name, tensor in batch.items():
            if name in batch.shared:
                lent[name] = tensor
            else:
                watched.append(tensor.numpy())  # torch holds it as long as it has a view of it
                lent[name] = torch.from_numpy(watched[-1])
        self._watch(batch, watched)
        return Batch(lent, shared=batch.shared)

    def _watch(self, batch: Batch, arrays: Iterable[Any]) -> None:
        others: deque[None] = deque()  # one for each array but the last: to take one is atomic
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
