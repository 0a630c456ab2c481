"""Check that the ranks of a torch process group reduce the gradients of the same step."""

from typing import Any

import torch
import torch.distributed as dist

from trackbed.errors import CollectiveError
from trackbed.grads.collectives import TorchCollectives
from trackbed.grads.collectives.torch import TorchWork
from trackbed.grads.waiting import Waiter

__all__ = ["StepCheck", "step_check"]


class StepCheck:
    """Exchanges the number of the step, beside the gradients, whose collectives cannot carry it.

    Args:
        process_group: torch's process group.
        device: device of the gradients.
    """

    def __init__(self, process_group: Any, device: torch.device) -> None:
        self._group = process_group
        self._mine = torch.zeros(1, dtype=torch.int64, device=device)
        self._all = torch.zeros(process_group.size(), dtype=torch.int64, device=device)
        self._work: TorchWork | None = None

    def begin(self, step: int) -> None:
        """Sends the number of this rank's step, before its gradients are reduced."""
        self._mine.fill_(step)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._work = TorchWork(
            [gather(self._all, self._mine, group=self._group, async_op=True)], device=self._mine.device
        )

    def finish(self, waiter: Waiter) -> None:
        """Waits for the numbers of the other ranks.

        Raises:
            CollectiveError: a rank is in another step.
        """
        if self._work is None:
            return
        waiter.wait(self._work, "exchange of step numbers")
        self._work = None
        own = int(self._mine)
        for rank, step in enumerate(self._all.tolist()):
            if step != own:
                msg = (
                    f"gradients: all ranks must reduce the same step, but rank {rank} is in step {step} and rank "
                    f"{self._group.rank()} in step {own}"
                )
                raise CollectiveError(msg)


def step_check(collectives: Any, process_group: Any, device: torch.device) -> StepCheck | None:
    """Check for these collectives; None if they need none."""
    return StepCheck(process_group, device) if isinstance(collectives, TorchCollectives) else None
