"""Who builds which index: the plan, by itself."""

import random
import time
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trackbed.builder.schedule import Task, chunk_cost, chunks_of, plan_tasks
from trackbed.errors import ArgumentError

costs = st.lists(st.integers(0, 100), max_size=40)
blends = st.lists(st.integers(0, 300), max_size=8)
num_ranks = st.integers(1, 12) | st.sampled_from([64, 16_384])
PLAN_SECONDS = 0.5


def tasks_of(costs, blends=()):
    plain = [Task(f"dataset {number}", cost) for number, cost in enumerate(costs)]
    return plain + [Task(f"blend {number}", cost, is_blend=True) for number, cost in enumerate(blends)]


def best_makespan(costs, num_ranks):
    """By trying every plan."""
    most = []
    for chosen in product(range(num_ranks), repeat=len(costs)):
        loads = [0] * num_ranks
        for rank, cost in zip(chosen, costs, strict=True):
            loads[rank] += cost
        most.append(max(loads))
    return min(most)


@given(costs=costs, blends=blends, num_ranks=num_ranks)
def test_every_task_is_done_once_and_blends_come_first(costs, blends, num_ranks):
    tasks = tasks_of(costs, blends)
    plan = plan_tasks(tasks, num_ranks)
    assert sorted(task for mine in plan.by_rank for task in mine) == list(range(len(tasks)))
    assert len(plan.by_rank) == num_ranks
    for mine in plan.by_rank:
        kinds = [tasks[task].is_blend for task in mine]
        assert kinds == sorted(kinds, reverse=True)
        for kind in (True, False):
            of_a_kind = [tasks[task].cost for task in mine if tasks[task].is_blend is kind]
            assert of_a_kind == sorted(of_a_kind, reverse=True)


@given(costs=costs, blends=blends, num_ranks=num_ranks, seed=st.integers(0, 2**32 - 1))
def test_the_plan_does_not_depend_on_the_order_in_which_tasks_are_told(costs, blends, num_ranks, seed):
    tasks = tasks_of([cost // 20 for cost in costs], blends)  # many ties
    mixed = random.Random(seed).sample(tasks, len(tasks))

    def names(tasks):
        return [[tasks[task].name for task in mine] for mine in plan_tasks(tasks, num_ranks).by_rank]

    assert names(mixed) == names(tasks)


@given(costs=costs, blends=blends, num_ranks=num_ranks)
def test_the_makespan_is_that_of_the_busiest_rank_and_not_below_the_bound(costs, blends, num_ranks):
    tasks = tasks_of(costs, blends)
    plan = plan_tasks(tasks, num_ranks)
    assert plan.makespan == max(sum(tasks[task].cost for task in mine) for mine in plan.by_rank)
    assert plan.makespan >= plan.lower_bound
    assert plan.makespan <= (2 - 1 / num_ranks) * plan.lower_bound + 1e-9


@given(costs=costs, num_ranks=num_ranks)
def test_without_blends_the_makespan_is_within_three_halves_of_the_bound(costs, num_ranks):
    plan = plan_tasks(tasks_of(costs), num_ranks)
    assert plan.makespan <= (1.5 - 1 / (2 * num_ranks)) * plan.lower_bound + 1e-9


@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=7), num_ranks=st.integers(1, 3))
def test_without_blends_the_makespan_is_within_four_thirds_of_the_best(costs, num_ranks):
    plan, best = plan_tasks(tasks_of(costs), num_ranks), best_makespan(costs, num_ranks)
    assert plan.lower_bound <= best
    assert plan.makespan <= (4 / 3 - 1 / (3 * num_ranks)) * best + 1e-9


def test_the_bound_may_be_a_third_below_the_best():
    """Five ranks, whose four long tasks leave no room: this plan is the best, and yet 1.4 times the bound."""
    plan = plan_tasks(tasks_of([0.9] * 4 + [0.5] * 3), 5)
    assert (plan.makespan, plan.lower_bound) == (pytest.approx(1.4), pytest.approx(1.02))


def test_a_plan_needs_a_rank():
    with pytest.raises(ArgumentError, match="num_ranks must be at least 1, found 0"):
        plan_tasks([], 0)


@given(
    costs=costs, blends=blends, num_ranks=num_ranks, small=st.integers(0, 10), scale=st.sampled_from([1e4, 1e7, 1e9])
)
def test_chunks_hold_every_task_once_longest_first_and_blends_alone(costs, blends, num_ranks, small, scale):
    tasks = [task._replace(cost=task.cost * scale) for task in tasks_of(costs, blends)]
    tasks += [Task(f"small {number}", 1e5, is_small=True) for number in range(small)]
    chunks = chunks_of(tasks, num_ranks)
    order = [tasks[number] for chunk in chunks for number in chunk]
    assert sorted(number for chunk in chunks for number in chunk) == list(range(len(tasks)))
    assert order == sorted(order, key=lambda task: (not task.is_blend, -task.cost, task.name))
    enough = chunk_cost(sum(task.cost for task in tasks), num_ranks)
    assert enough >= 2e7
    for chunk in chunks:
        some = [tasks[number] for number in chunk]
        assert len(some) == 1 or not any(task.is_blend for task in some)
        assert len({task.is_small for task in some}) == 1
        assert sum(task.cost for task in some[:-1]) < enough


@pytest.mark.parametrize("num_ranks", [16, 1_024, 16_384])
def test_ten_thousand_datasets_are_planned_in_half_a_second(num_ranks):
    draw = random.Random(num_ranks)
    tasks = [
        Task(f"{draw.getrandbits(128):032x}-GPTDataset-{n % 3} {n}", draw.paretovariate(1.1)) for n in range(30_000)
    ]
    tasks += [Task(f"{n:032x}-BlendedDataset {n}", draw.paretovariate(1.1), is_blend=True) for n in range(3)]
    seconds = []
    for _ in range(3):
        began = time.process_time()
        plan = plan_tasks(tasks, num_ranks)
        chunks_of(tasks, num_ranks)
        seconds.append(time.process_time() - began)
    assert min(seconds) < PLAN_SECONDS
    assert plan.lower_bound <= plan.makespan <= 1.5 * plan.lower_bound
