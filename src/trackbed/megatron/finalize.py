"""End of the gradients of a step, for several parts of a model."""

from collections.abc import Sequence

import numpy as np
import torch

from trackbed.grads.collectives.protocol import TOKENS
from trackbed.megatron.ddp import DistributedDataParallel


def finalize_model_grads(
    model: Sequence[DistributedDataParallel], num_tokens: torch.Tensor | int | None = None
) -> int | None:
    """Collective over the ranks: finishes the gradients of all parts of a model, and divides them by the tokens.

    Covers data parallelism only: Megatron Core's function of this name also reduces what pipeline and tensor parallel
    ranks share, and runs on these wrappers too.

    Args:
        model: wrappers of the parts of the model that this rank has, at least one.
        num_tokens: number of tokens of this rank in the step; gradients are divided by the sum over all ranks. None
            to leave them as they are.

    Returns:
        The sum of `num_tokens` over all ranks; None if that is None.

    Raises:
        GradientError: see `DistributedDataParallel.finish_grad_sync`.
        CollectiveError: another rank failed.
    """
    for part in model:
        part.finish_grad_sync()
    if num_tokens is None:
        return None
    own = np.array([int(num_tokens)], dtype=np.int64)
    total: int = sum(model[0].engine.exchange(own, TOKENS)[:, 0].tolist())
    for part in model:
        part.scale_gradients(1.0 / max(total, 1))
    return total
