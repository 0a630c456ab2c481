"""Who builds which index: longest task first, onto the least loaded rank. Pure, and the same on every rank.

Shapes: T tasks, R ranks.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from trackbed.errors import ArgumentError

__all__ = ["Plan", "Task", "leave_open", "plan_tasks"]


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
    loads = [(0.0, rank) for rank in range(num_ranks)]  # sorted, so a heap
    by_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    for task in _longest_first(tasks):
        load, rank = loads[0]
        by_rank[rank].append(task)
        heapq.heapreplace(loads, (load + tasks[task].cost, rank))
    makespan = max(load for load, _ in loads)
    return Plan(tuple(map(tuple, by_rank)), makespan, _lower_bound([task.cost for task in tasks], num_ranks))


def leave_open(tasks: Sequence[Task], plan: Plan, *, least: float = 0.0) -> tuple[list[list[int]], list[int]]:
    """Cut a plan: what a rank does in any case, and what is done by whoever is free first.

    Ranks are not equally fast, whatever the costs say: a file system, a neighbour or fresh memory slows one of them
    down. So what each begins with is its own, a quarter of a fair part or one task more, and the rest is left open to
    all. Blends are not, and nothing is for one alone.

    Args:
        tasks: `[T]` what is to be done.
        plan: of these tasks.
        least: cost of a rank's fair part below which nothing is left open, in the unit of the tasks.

    Returns:
        `[R]` numbers of the tasks that are a rank's own, in its order; and the others, longest first.

    >>> tasks = [Task("a", 4), Task("b", 4), Task("c", 2), Task("d", 2), Task("e", 1), Task("f", 1)]
    >>> leave_open(tasks, plan_tasks(tasks, 2))
    ([[0], [1]], [2, 3, 4, 5])
    """
    fair = sum(task.cost for task in tasks) / len(plan.by_rank)
    enough = math.inf if len(plan.by_rank) == 1 or fair < least else fair / 4
    own: list[list[int]] = []
    for planned in plan.by_rank:
        loads = accumulate((tasks[task].cost for task in planned), initial=0.0)
        own.append([task for task, load in zip(planned, loads, strict=False) if load < enough or tasks[task].is_blend])
    kept = set(chain.from_iterable(own))
    return own, [task for task in _longest_first(tasks) if task not in kept]


def _longest_first(tasks: Sequence[Task]) -> list[int]:
    """Numbers of the tasks, in the order in which they are planned."""
    return sorted(range(len(tasks)), key=lambda task: (not tasks[task].is_blend, -tasks[task].cost, tasks[task].name))


def _lower_bound(costs: Sequence[float], num_ranks: int) -> float:
    """The largest of the mean load and, of the k R + 1 longest tasks, the k + 1 shortest: one rank has as many."""
    descending = sorted(costs, reverse=True)
    sums = [0.0, *accumulate(descending)]
    shared = (
        sums[first + 1] - sums[first - together] for together, first in enumerate(range(0, len(descending), num_ranks))
    )
    return max(sum(costs) / num_ranks, max(shared, default=0.0))
