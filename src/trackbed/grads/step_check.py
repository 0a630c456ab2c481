"""Check that the ranks reduce the gradients of the same step."""

import numpy as np

from trackbed.errors import CollectiveError
from trackbed.grads.collectives import Collectives, Exchange
from trackbed.grads.collectives.protocol import LEFT, NO_LABEL
from trackbed.grads.waiting import Waiter

__all__ = ["StepCheck"]


class StepCheck:
    """Exchanges the number of the step, beside gradients whose collectives cannot carry it, and at the end.

    Args:
        collectives: those of the gradients.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._step = 0
        self._exchange: Exchange | None = None

    def begin(self, step: int) -> None:
        """Sends the number of this rank's step, before its gradients are reduced; `LEFT.step` after the last one."""
        self._step = step
        label = LEFT if step == LEFT.step else NO_LABEL
        self._exchange = self._collectives.exchange(np.array([step], dtype=np.int64), label=label)

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
                    f"gradients: all ranks must reduce the same step, but {_place(rank, step)} and "
                    f"{_place(self._collectives.rank(), self._step)}"
                )
                raise CollectiveError(msg)


def _place(rank: int, step: int) -> str:
    return f"rank {rank} has left the training loop" if step == LEFT.step else f"rank {rank} is in step {step}"
