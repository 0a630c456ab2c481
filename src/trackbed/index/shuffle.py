"""The shuffle index: the sample at each position of one dataset.

Shapes: R samples.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.index.epochs import EpochPlan
from trackbed.index.legacy_random import LegacyShuffle


def shuffle_index_dtype(num_samples: int) -> type[np.uint32] | type[np.int64]:
    """uint32 below 2**32 - 2 samples, as in Megatron Core, else int64."""
    return np.uint32 if num_samples < np.iinfo(np.uint32).max - 1 else np.int64


def shuffle_index(
    plan: EpochPlan, shuffle: LegacyShuffle, *, allocate: Callable[..., npt.NDArray[Any]] = np.empty
) -> npt.NDArray[np.integer[Any]]:
    """Shuffles all samples together, except that those of a separate last epoch are shuffled on their own.

    Args:
        plan: number of samples, and number of samples before a separate last epoch.
        shuffle: the dataset's stream of shuffles, after the document index has drawn from it.
        allocate: called with shape and dtype; returns the array to fill.

    Returns:
        `[R]` sample at each position.

    >>> plan = EpochPlan(num_epochs=1, num_samples=10, samples_before_last=None)
    >>> shuffle_index(plan, LegacyShuffle(1234)).tolist()
    [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]
    """
    order = allocate((plan.num_samples,), shuffle_index_dtype(plan.num_samples))
    last_epoch = plan.samples_before_last or 0
    shuffle.fill_range(order[:last_epoch], 0)
    shuffle.fill_range(order[last_epoch:], last_epoch)
    return order
