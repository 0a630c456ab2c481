"""Schedule of the indices that a start builds: longest first, blends before all others. Pure.

Shapes: T tasks, R ranks.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from trackbed.errors import ArgumentError

_LEAST_CHUNK: Final = 2e7
"""Nanoseconds of a chunk, at least: to ask for one takes 1e5."""
_CHUNKS_PER_RANK: Final = 64


class Task(NamedTuple):
    """One index that is to be built."""

    name: str
    """Differs from every other task's; equal costs are taken in its order."""
    cost: float
    """Time that one rank takes, in any unit."""
    is_blend: bool = False
    """True for a blend, which one thread builds alone, and which is therefore scheduled before all others."""
    is_small: bool = False
    """True if it is built in batches with other small ones."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Assignment of tasks to ranks."""

    by_rank: tuple[tuple[int, ...], ...]
    """`[R]` numbers of the tasks of each rank, in the order in which it does them."""
    makespan: float
    """Cost of the rank that has most to do."""
    lower_bound: float
    """Lower bound of the makespan of any plan."""


def plan_tasks(tasks: Sequence[Task], num_ranks: int) -> Plan:
    """Longest task first onto the least loaded rank, of equal ones the first; blends before all others.

    Without blends the makespan is within 4/3 of the best (R. L. Graham, Bounds on multiprocessing timing anomalies,
    1969), and within 3/2 of `lower_bound`, which may itself lie below the best; with blends it is within twice the
    bound. A blend that is cheaper than many other tasks, and planned before them, makes little difference.

    Args:
        tasks: `[T]` what is to be done.
        num_ranks: R, at least 1.

    >>> tasks = [Task("a", 3), Task("b", 3), Task("c", 2), Task("d", 2), Task("e", 2), Task("f", 1, is_blend=True)]
    >>> plan = plan_tasks(tasks, 2)
    >>> plan.by_rank, plan.makespan, plan.lower_bound
    (((5, 1, 3), (0, 2, 4)), 7.0, 6.5)
    """
    if num_ranks < 1:
        raise ArgumentError(f"num_ranks must be at least 1, found {num_ranks}")
    loads = [(0.0, rank) for rank in range(num_ranks)]  # sorted, so a heap
    by_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    for task in _longest_first(tasks):
        load, rank = loads[0]
        by_rank[rank].append(task)
        heapq.heapreplace(loads, (load + tasks[task].cost, rank))
    makespan = max(load for load, _ in loads)
    return Plan(tuple(map(tuple, by_rank)), makespan, _lower_bound([task.cost for task in tasks], num_ranks))


def chunk_cost(cost: float, num_ranks: int) -> float:
    """Returns the nanoseconds of a chunk: a sixty-fourth of a rank's fair part of `cost`, and at least 20 ms."""
    return max(_LEAST_CHUNK, cost / num_ranks / _CHUNKS_PER_RANK)


def chunks_of(tasks: Sequence[Task], num_ranks: int) -> list[list[int]]:
    """Cuts tasks into chunks that a thread of a rank takes one at a time: longest first, blends before all others.

    A blend is a chunk of its own. A chunk of others takes a sixty-fourth of a rank's fair part, and at least 20 ms; its
    tasks are all small, or none is.

    Args:
        tasks: `[T]` tasks; costs are in nanoseconds.
        num_ranks: number of ranks that share them, at least 1.

    Returns:
        Numbers of the tasks of each chunk.

    >>> tasks = [Task("a", 1e7), Task("b", 3e7), Task("c", 1e7), Task("d", 1e6, is_blend=True), Task("e", 1e7)]
    >>> chunks_of(tasks, 2)
    [[3], [1], [0, 2], [4]]
    """
    enough = chunk_cost(sum(task.cost for task in tasks), num_ranks)
    chunks: list[list[int]] = []
    cost = enough
    for number in _longest_first(tasks):
        task = tasks[number]
        is_other = not chunks or task.is_small != tasks[chunks[-1][0]].is_small
        if task.is_blend or cost >= enough or is_other:
            chunks.append([])
            cost = 0.0
        chunks[-1].append(number)
        cost += enough if task.is_blend else task.cost
    return chunks


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
