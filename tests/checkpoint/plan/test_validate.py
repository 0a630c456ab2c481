"""Checks of the shards of all ranks."""

import dataclasses
import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed.checkpoint.plan.shard_table import Table, join_tables, tabulate
from trackbed.checkpoint.plan.validate import find_problems
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor


def box(key, shape, whole, offset, *, is_main=True, dtype=torch.float32):
    return ShardedTensor(key, None, dtype, shape, whole, offset, None, 0 if is_main else 1)


def problems(*ranks):
    return find_problems(join_tables([tabulate(shards, rank) for rank, shards in enumerate(ranks)]))


def test_a_table_survives_the_way_to_another_rank():
    table = tabulate(
        [box("a", (2, 4), (4, 4), (2, 0)), ShardedObject("o/p", None, (3,), (1,), 2), box("b", (), (), ())], 7
    )
    found = Table.decode(table.encode())
    assert found.encode() == table.encode()
    assert found.keys == ("a", "o/p", "b")
    assert [found.region(row) for row in range(3)] == ["[2:4, 0:4]", "[1:2]", "[]"]
    assert table.digest() == found.digest() != tabulate([box("a", (2, 4), (4, 4), (2, 0))], 7).digest()
    assert len(Table.decode(tabulate([], 0).encode())) == 0


def test_what_is_covered_once_has_no_problem():
    grid = [ShardedObject("o", None, (2, 2), place) for place in itertools.product(range(2), repeat=2)]
    assert (
        problems(
            [box("a", (2, 4), (4, 4), (0, 0)), box("b", (3,), (3,), (0,)), *grid[:2], box("e", (0, 3), (0, 3), (0, 0))],
            [box("a", (2, 4), (4, 4), (2, 0)), box("b", (3,), (3,), (0,), is_main=False), *grid[2:]],
            [],
        )
        == []
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            [[box("a", (2,), (4,), (0,))], [box("a", (2,), (4,), (0,))]],
            [
                "a: main replicas must cover each element once, but ranks 0, 1 have [0:2]",
                "a: main replicas must cover all elements, but no rank has [2:4]",
            ],
        ),
        ([[box("a", (3,), (4,), (0,))]], ["a: main replicas must cover all elements, but no rank has [3:4]"]),
        (
            [[box("a", (3,), (5,), (0,))], [box("a", (3,), (5,), (2,))]],
            ["a: main replicas must cover each element once, but ranks 0, 1 have [2:3]"],
        ),
        (
            [[box("a", (1,), (1,), (0,)), box("a", (1,), (1,), (0,))]],
            ["a: main replicas must cover each element once, but rank 0 has 2 times [0:1]"],
        ),
        (
            [[box("a", (2, 3), (2, 3), (0, 0), is_main=False)]],
            ["a: main replicas must cover [0:2, 0:3], but no rank has one"],
        ),
        ([[ShardedObject("o", None, (2,), (0,))]], ["o: main replicas must cover all elements, but no rank has [1:2]"]),
        (
            [[box("a", (2,), (4,), (0,))], [box("a", (2,), (5,), (3,))]],
            [
                "a: all shards must have one kind, type and shape, but "
                "rank 1 has a tensor of torch.float32 of shape (5,) "
                "and rank 0 has a tensor of torch.float32 of shape (4,)"
            ],
        ),
        (
            [[box("a", (1,), (1,), (0,))], [ShardedObject("a", None, (1,), (0,), 1)]],
            [
                "a: all shards must have one kind, type and shape, but "
                "rank 1 has an object of shape (1,) and rank 0 has a "
                "tensor of torch.float32 of shape (1,)"
            ],
        ),
        ([[box("a", (2,), (3,), (2,))]], ["a: each box must lie within (3,), but rank 0 has [2:4]"]),
    ],
)
def test_each_problem_is_described_by_key_region_and_ranks(ranks, words):
    assert problems(*ranks) == words


@given(st.data())
def test_any_boxes_are_judged_as_by_counting(data):
    axes = data.draw(st.integers(0, 3))
    whole = tuple(data.draw(st.integers(1, 4)) for _ in range(axes))
    boxes = []
    for _ in range(data.draw(st.integers(1, 5))):
        offset = tuple(data.draw(st.integers(0, size - 1)) for size in whole)
        shape = tuple(data.draw(st.integers(0, size - low)) for low, size in zip(offset, whole, strict=True))
        boxes.append(box("a", shape, whole, offset))
    counts = np.zeros(whole, dtype=int)
    for one in boxes:
        counts[one.global_slice()] += 1
    found = problems(boxes)
    assert bool(found) == bool((counts != 1).any())
    assert any("each element once" in text for text in found) == bool((counts > 1).any())


def test_boxes_with_very_many_edges_are_judged_too(monkeypatch):
    monkeypatch.setattr("trackbed.checkpoint.plan.validate._MAX_CELLS", 1)
    cases = [
        ([(0, 3), (2, 3)], 5, "a: main replicas must cover each element once, but ranks 0, 1 have [2:5]"),
        ([(0, 1), (2, 3)], 5, "a: main replicas must cover all 5 elements, but cover 4"),
    ]
    for boxes, size, words in cases:
        assert problems(*[[box("a", (count,), (size,), (low,))] for low, count in boxes]) == [words]
    assert problems([box("a", (1,), (3,), (0,)), box("a", (2,), (3,), (1,))]) == []


def test_a_million_shards_are_judged_in_seconds():
    num = 1024
    first = tabulate(
        [ShardedTensor(f"k{key}", None, torch.float32, (1, 8), (num, 8), (0, 0), (num, 1)) for key in range(num)], 0
    )
    tables = []
    for rank in range(num):
        offset = first.offset.copy()
        offset[:, 0] = rank
        tables.append(dataclasses.replace(first, offset=offset, rank=first.rank + rank))
    start = time.process_time()
    table = join_tables(tables)
    assert find_problems(table) == []
    assert time.process_time() - start < 3
    table.offset[5, 0] = 3
    assert len(find_problems(table)) == 2
    assert math.prod(table.shape[0]) == 8
