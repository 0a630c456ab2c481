"""Check that the ranks reduce the gradients of the same step."""

import numpy as np

from trackbed.grads.collectives import Collectives, Exchange, Label
from trackbed.grads.failure_aware_wait import Waiter

__all__ = ["StepCheck"]


class StepCheck:
    """Exchange of the step, beside gradients whose collectives cannot carry it, and at the end.

    Args:
        collectives: those of the gradients.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._exchange: Exchange | None = None

    def begin(self, label: Label) -> None:
        """Sends the label of this rank's step, before its gradients are reduced; `LEFT` after the last one."""
        self._exchange = self._collectives.exchange(np.zeros(1, dtype=np.int64), label=label)

    def finish(self, waiter: Waiter, what: str = "exchange of step numbers") -> None:
        """Waits for the labels of the other ranks.

        Args:
            waiter: waits.
            what: description, with which an error begins.

        Raises:
            CollectiveError: a rank is in another step.
        """
        if self._exchange is not None:
            waiter.wait(self._exchange.work, what)
            self._exchange.read()
            self._exchange = None
