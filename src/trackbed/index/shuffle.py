"""The shuffle index: which sample comes k-th.

Shapes: R samples.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.index.epochs import EpochPlan
from trackbed.index.legacy_random import LegacyShuffle

__all__ = ["shuffle_index", "shuffle_index_dtype"]


def shuffle_index_dtype(num_samples: int) -> type[np.uint32] | type[np.int64]:
    """uint32 below 2**32 - 2 samples, as Megatron Core chooses."""
    return np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64


def shuffle_index(
    plan: EpochPlan, shuffle: LegacyShuffle, *, allocate: Callable[..., npt.NDArray[Any]] = np.empty
) -> npt.NDArray[np.integer[Any]]:
    """All samples, shuffled together; those of a separate last epoch apart.

    Args:
        plan: how many samples, and which of them belong to a separate last epoch.
        shuffle: the dataset's stream of shuffles, after the document index has drawn from it.
        allocate: gives the array to be filled, from its shape and dtype.

    Returns:
        `[R]` sample at each position.

    >>> plan = EpochPlan(num_epochs=1, num_samples=10, samples_before_last=None)
    >>> shuffle_index(plan, LegacyShuffle(1234)).tolist()
    [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]
    """
    order = allocate((plan.num_samples,), shuffle_index_dtype(plan.num_samples))
    last_epoch = plan.samples_before_last or 0
    shuffle.run(order[:last_epoch], 0)
    shuffle.run(order[last_epoch:], last_epoch)
    return order
