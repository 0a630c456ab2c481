"""Assignments of shards to ranks."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed.checkpoint.plan.assignment import assign_balanced, assign_to_main_replicas
from trackbed.checkpoint.plan.shard_table import join_tables, tabulate
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor


def tables(num_ranks, shards_of):
    return join_tables([tabulate(shards_of(rank), rank) for rank in range(num_ranks)])


def replicated(sizes):
    return lambda rank: [
        ShardedTensor(f"k{number}", None, torch.float32, (size, 1024), (size, 1024), (0, 0), None, rank)
        for number, size in enumerate(sizes)
    ]


def loads(table, plan, num_ranks):
    """Bytes that each rank writes."""
    parts = np.where(
        plan.axis < 0, 1.0, (plan.stop - plan.start) / np.maximum(table.shape[plan.row, np.maximum(plan.axis, 0)], 1)
    )
    return np.bincount(plan.rank, table.num_bytes[plan.row] * parts, minlength=num_ranks)


@given(sizes=st.lists(st.integers(1, 20_000), max_size=12), num_ranks=st.integers(1, 9))
def test_each_element_is_written_once_by_a_rank_that_has_it(sizes, num_ranks):
    table = tables(num_ranks, replicated(sizes))
    plan = assign_balanced(table, num_ranks)
    written = {number: np.zeros(size, dtype=int) for number, size in enumerate(sizes)}
    for row, rank, start, stop, axis in zip(plan.row, plan.rank, plan.start, plan.stop, plan.axis, strict=True):
        assert table.rank[row] == rank
        written[table.key[row]][start:stop] += axis == 0
        written[table.key[row]][:] += axis < 0
    assert all((counts == 1).all() for counts in written.values())


def test_the_work_is_even_although_one_tensor_is_larger_than_all_others():
    table = tables(8, replicated([100_000, *range(1, 200)]))
    found = loads(table, assign_balanced(table, 8), 8)
    assert found.max() / found.mean() < 1.05


def test_the_plan_is_the_same_in_any_order_of_ranks_and_keys():
    def described(order):
        table = join_tables(
            [
                tabulate(list(replicated([300, 5_000, 70, 70, 8])(rank))[:: 1 if order else -1], rank)
                for rank in range(3)
            ]
        )
        plan = assign_balanced(table, 3)
        columns = zip(plan.row, plan.rank, plan.start, plan.stop, strict=True)
        return sorted(
            (table.keys[table.key[row]], int(rank), int(start), int(stop)) for row, rank, start, stop in columns
        )

    assert [part[0] for part in described(True)] == [part[0] for part in described(False)]


def test_other_copies_are_written_only_if_they_are_boxes_of_main_replicas():
    def shards(rank):
        if rank == 0:
            return [
                ShardedTensor("a", None, torch.float32, (4,), (4,), (0,), None, 0),
                ShardedObject("o", None, (1,), (0,), 0),
            ]
        half = [ShardedTensor("a", None, torch.float32, (2,), (4,), (2 * part,), None, 1) for part in range(2)]
        return [
            *half,
            ShardedObject("o", None, (1,), (0,), 1),
            ShardedTensor("e", None, torch.float32, (0,), (0,), (0,), None, 0),
        ]

    table = tables(2, shards)
    for plan in (assign_balanced(table, 2), assign_to_main_replicas(table, 2)):
        is_whole = table.shape[plan.row].all(axis=1)
        assert sorted(plan.row[is_whole].tolist()) == [0, 1]
        assert plan.rank[is_whole].tolist() == [0, 0]
    assert sorted(assign_balanced(table, 2).row.tolist()) == [0, 1, 5]
    assert sorted(assign_to_main_replicas(table, 2).row.tolist()) == [0, 1]


def test_the_work_is_even_where_each_shard_has_few_copies():
    num_ranks, copies, per_rank = 64, 8, 40

    def shards(rank):
        first = rank // copies * copies * per_rank
        return [
            ShardedTensor(f"k{number}", None, torch.float32, shape, shape, (0, 0), None, rank % copies)
            for number in range(first, first + copies * per_rank)
            for shape in [(64 + number % 7, 1024)]
        ]

    table = tables(num_ranks, shards)
    plan = assign_balanced(table, num_ranks)
    assert (table.rank[plan.row] == plan.rank).all()
    found = loads(table, plan, num_ranks)
    assert found.max() / found.mean() < 1.05
