"""Collectives of a single rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trackbed.grads.collectives.protocol import DONE, NO_LABEL, Exchange, Label, Work


@dataclass(frozen=True, slots=True)
class SoloCollectives:
    """Collectives of a single rank: nothing but the scaling is left to do. See `Collectives`."""

    def rank(self) -> int:
        """0."""
        return 0

    def size(self) -> int:
        """1."""
        return 1

    def num_issued(self) -> int:
        """0: nothing is waited for."""
        return 0

    def all_reduce(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Scales the buffers."""
        if scale != 1.0:
            for buffer in buffers:
                buffer *= scale
        return DONE

    def reduce_scatter(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Scales the buffers."""
        return self.all_reduce(buffers, scale=scale, average=average, label=label)

    def all_gather(self, buffers: Sequence[torch.Tensor], *, label: Label) -> Work:
        """Does nothing."""
        return DONE

    def exchange(self, numbers: npt.NDArray[np.int64], *, label: Label = NO_LABEL) -> Exchange:
        """Returns the numbers."""
        sent = numbers[np.newaxis].copy()
        return Exchange(DONE, lambda _: sent)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int) -> Work:
        """Does nothing."""
        return DONE
