"""Who builds which index: longest task first, onto the least loaded rank. Pure, and the same on every rank.

Shapes: T tasks, R ranks.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from trackbed.errors import ArgumentError

__all__ = ["Plan", "Task", "plan_tasks"]


class Task(NamedTuple):
    """One index that is to be built."""

    name: str
    """Differs from every other task's; equal costs are taken in its order."""
    cost: float
    """Time that one rank takes, in any unit."""
    is_blend: bool = False
    """Whether it is a blend, which nobody can help with and which is therefore planned before all others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who does what."""

    by_rank: tuple[tuple[int, ...], ...]
    """`[R]` numbers of the tasks of each rank, in the order in which it does them."""
    makespan: float
    """Cost of the rank that has most to do."""
    lower_bound: float
    """What no plan can be below."""


def plan_tasks(tasks: Sequence[Task], num_ranks: int) -> Plan:
    """Longest task first onto the least loaded rank, of equal ones the first; blends before all others.

    Without blends the makespan is within 4/3 of the best (R. L. Graham, Bounds on multiprocessing timing anomalies,
    1969), and within 3/2 of `lower_bound`, which may itself lie below the best; with blends it is within twice the
    bound. A blend that is cheaper than many other tasks, and planned before them, makes little difference.

    Args:
        tasks: `[T]` what is to be done.
        num_ranks: R, at least 1.

    Raises:
        ArgumentError: there is no rank.

    >>> tasks = [Task("a", 3), Task("b", 3), Task("c", 2), Task("d", 2), Task("e", 2), Task("f", 1, is_blend=True)]
    >>> plan = plan_tasks(tasks, 2)
    >>> plan.by_rank, plan.makespan, plan.lower_bound
    (((5, 1, 3), (0, 2, 4)), 7.0, 6.5)
    """
    if num_ranks < 1:
        msg = f"num_ranks must be at least 1, found {num_ranks}"
        raise ArgumentError(msg)
    order = sorted(range(len(tasks)), key=lambda task: (not tasks[task].is_blend, -tasks[task].cost, tasks[task].name))
    loads = [(0.0, rank) for rank in range(num_ranks)]  # sorted, so a heap
    by_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    for task in order:
        load, rank = loads[0]
        by_rank[rank].append(task)
        heapq.heapreplace(loads, (load + tasks[task].cost, rank))
    makespan = max(load for load, _ in loads)
    return Plan(tuple(map(tuple, by_rank)), makespan, _lower_bound([task.cost for task in tasks], num_ranks))


def _lower_bound(costs: Sequence[float], num_ranks: int) -> float:
    """The largest of the mean load and, of the k R + 1 longest tasks, the k + 1 shortest: one rank has as many."""
    descending = sorted(costs, reverse=True)
    sums = [0.0, *accumulate(descending)]
    shared = (
        sums[first + 1] - sums[first - together] for together, first in enumerate(range(0, len(descending), num_ranks))
    )
    return max(sum(costs) / num_ranks, max(shared, default=0.0))
