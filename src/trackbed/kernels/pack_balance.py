"""Typed wrappers of the kernels that find the cost of packs, and deal packs to ranks.

Shapes: B packs, G leaves of a plan, R ranks.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.integers import check_at_least
from trackbed.kernels.packing import PackPlan, PackShape

MOST_HIDDEN: Final = 1 << 20
"""Highest hidden size for which costs of packs of any length are below 2**63."""


class PackCosts(NamedTuple):
    """Costs of the packs of a plan: those of one leaf cost the same."""

    first_packs: npt.NDArray[np.uint64]
    """`[G]` first pack of each leaf."""
    costs: npt.NDArray[np.int64]
    """`[G]` cost of its packs."""

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.first_packs.nbytes + self.costs.nbytes


def costs_of_plan(plan: PackPlan, shape: PackShape, *, hidden_size: int) -> PackCosts:
    """Returns the cost of the packs of each leaf: the sum of 12 h n + n^2 over documents of n places, with padding.

    Args:
        plan: from `plan_packs`.
        shape: what decides the items.
        hidden_size: h, in `[1, 2**20]`.

    Raises:
        ArgumentError: `hidden_size` is out of range.
    """
    check_at_least(1, hidden_size=hidden_size)
    if hidden_size > MOST_HIDDEN:
        raise ArgumentError(f"hidden_size must be at most 2**20, found {hidden_size}")
    costs = np.empty(len(plan.leaves) // 3, dtype=np.int64)
    _native.leaf_costs(plan.nodes, plan.leaves, shape.multiple, 12 * int(hidden_size), costs)
    return PackCosts(np.ascontiguousarray(plan.leaves[::3]), costs)


def find_costs(known: PackCosts, packs: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """`[B]` costs of packs.

    Args:
        known: from `costs_of_plan`.
        packs: `[B]` numbers of packs, below that of the plan.

    Raises:
        ArgumentError: the plan has no packs.
    """
    if len(packs) and not len(known.costs):
        raise ArgumentError(f"packs must be of a plan that has some, found {len(packs)}")
    costs = np.empty(len(packs), dtype=np.int64)
    _native.find_costs(known.first_packs, known.costs, np.ascontiguousarray(packs, dtype=np.uint64), costs)
    return costs


def deal_packs(costs: npt.NDArray[np.int64], num_ranks: int) -> npt.NDArray[np.int64]:
    """`[B / R, R]` pack of each turn and rank.

    Packs are sorted by falling cost, those of one cost by number. Of each R neighbours the heaviest goes to the rank
    with the least so far, of several such ranks to the first one.

    Args:
        costs: `[B]` each at least 0.
        num_ranks: R, at least 1; it divides B.

    Raises:
        ArgumentError: an argument is out of range, or costs of a rank may add up to 2**63 or more.

    >>> deal_packs(np.array([1, 9, 4, 7]), 2).tolist()
    [[1, 3], [0, 2]]
    """
    check_at_least(1, num_ranks=num_ranks)
    if len(costs) % num_ranks:
        raise ArgumentError(f"num_ranks must divide the number of packs, {len(costs)}, found {num_ranks}")
    most = int(costs.max(initial=0)) * (len(costs) // num_ranks)
    if most >= 1 << 63 or int(costs.min(initial=0)) < 0:
        raise ArgumentError(
            f"costs must be at least 0, and of a rank below 2**63, found {costs.min()} and up to {most}"
        )
    dealt = np.empty(len(costs), dtype=np.int64)
    _native.deal_packs(np.ascontiguousarray(costs, dtype=np.int64), num_ranks, dealt)
    return dealt.reshape(-1, num_ranks)
