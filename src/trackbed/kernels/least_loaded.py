"""Typed wrapper of the kernel that shares work among ranks.

Shapes: P parts, C candidates, R ranks.
"""

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native

Int64s = npt.NDArray[np.int64]


def assign_least_loaded(costs: Int64s, first: Int64s, end: Int64s, ranks: Int64s, num_ranks: int) -> Int64s:
    """Gives parts to ranks, in order: each to the candidate with the least so far, the first of several.

    Args:
        costs: `[P]` cost of each part, not negative, in any unit.
        first: `[P]` place of its first candidate in `ranks`.
        end: `[P]` end of its candidates, after `first`.
        ranks: `[C]` ranks in `[0, num_ranks)`.
        num_ranks: R, at least 1.

    Returns:
        `[P]` place of the chosen candidate in `ranks`.

    Raises:
        ArgumentError: an argument is none of these.

    >>> ranks = np.array([0, 1, 2])
    >>> assign_least_loaded(np.array([5, 4, 2]), np.array([0, 0, 0]), np.array([3, 2, 2]), ranks, 3)
    array([0, 1, 1])
    """
    arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in (costs, first, end, ranks)]
    costs, first, end, ranks = arrays
    is_valid = (
        all(array.ndim == 1 for array in arrays)
        and len(costs) == len(first) == len(end)
        and (not len(costs) or (first.min() >= 0 and end.max() <= len(ranks) and (first < end).all()))
        and (not len(ranks) or (ranks.min() >= 0 and ranks.max() < num_ranks))
        and (not len(costs) or costs.min() >= 0)
        and float(costs.sum(dtype=np.float64)) < 2.0**62
    )
    if not is_valid:
        found = f"{len(costs)} costs, {len(first)} and {len(end)} bounds, {len(ranks)} candidates of {num_ranks} ranks"
        raise ArgumentError(
            f"parts must each have a cost that is not negative, and candidates that are ranks, found {found}"
        )
    chosen = np.empty(len(costs), dtype=np.int64)
    _native.assign_least_loaded(costs, first, end, ranks, np.zeros(max(num_ranks, 1), dtype=np.int64), chosen)
    return chosen
