"""Check that the ranks reduce the gradients of the same step."""

import numpy as np

from trackbed.errors import CollectiveError
from trackbed.grads.collectives import Collectives, Exchange
from trackbed.grads.waiting import Waiter

__all__ = ["StepCheck"]


class StepCheck:
    """Exchanges the number of the step, beside gradients whose collectives cannot carry it.

    Args:
        collectives: those of the gradients.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._step = 0
        self._exchange: Exchange | None = None

    def begin(self, step: int) -> None:
        """Sends the number of this rank's step, before its gradients are reduced."""
        self._step = step
        self._exchange = self._collectives.exchange(np.array([step], dtype=np.int64))

    def finish(self, waiter: Waiter) -> None:
        """Waits for the numbers of the other ranks.

        Raises:
            CollectiveError: a rank is in another step.
        """
        if self._exchange is None:
            return
        waiter.wait(self._exchange.work, "exchange of step numbers")
        steps = self._exchange.read()[:, 0].tolist()
        self._exchange = None
        for rank, step in enumerate(steps):
            if step != self._step:
                msg = (
                    f"gradients: all ranks must reduce the same step, but rank {rank} is in step {step} and rank "
                    f"{self._collectives.rank()} in step {self._step}"
                )
                raise CollectiveError(msg)
