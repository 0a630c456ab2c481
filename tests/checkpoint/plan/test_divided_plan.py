"""Plans of tensors whose places all ranks know: every element is written once, on any mesh."""

import itertools
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from tests.support.checkpoints.divided import layouts
from trackbed.checkpoint.plan.divided_plan import Described, DividedTable, plan_divided
from trackbed.checkpoint.state.divided_tensors import UNDIVIDED, Division, division_of
from trackbed.errors import CheckpointError

MESHES = [shape for axes in range(1, 4) for shape in itertools.product((1, 2, 3), repeat=axes)]


def division(shape, mesh_shape, placements, first_rank=0):
    ranks = range(first_rank, first_rank + math.prod(mesh_shape))
    return division_of(shape, ranks, mesh_shape, placements)


def described(key, shape, placed, dtype=torch.float32, alias_of=""):
    return Described(key, dtype, shape, placed, alias_of)


@st.composite
def tables(draw):
    """Table of all ranks of one mesh, with some tensors that each has whole."""
    mesh_shape = draw(st.sampled_from(MESHES))
    tensors = []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        layout = draw(layouts(len(shape), [mesh_shape]))
        placed = UNDIVIDED if draw(st.integers(0, 3)) == 0 else division(shape, mesh_shape, layout.placements)
        tensors.append(described(f"t{number}", shape, placed))
    return DividedTable(tuple(tensors)), list(range(math.prod(mesh_shape)))


@given(tables())
def test_each_element_is_written_once(found):
    table, ranks = found
    assert DividedTable.decode(table.encode()).tensors == table.tensors
    plan = plan_divided([(table, ranks)], {})
    counts = [np.zeros(tensor.shape, dtype=int) for tensor in plan.tensors]
    for rank in ranks:
        for part in plan.parts_of(rank):
            here = tuple(slice(low, low + size) for low, size in zip(part.box.offset, part.box.shape, strict=True))
            counts[part.tensor][here] += 1
            held = plan.tensors[part.tensor].division == UNDIVIDED or any(
                all(
                    low <= at and at + size <= low + whole
                    for low, whole, at, size in zip(box.offset, box.shape, part.box.offset, part.box.shape, strict=True)
                )
                for box in plan.tensors[part.tensor].division.boxes(
                    plan.tensors[part.tensor].shape, plan.tensors[part.tensor].division.coordinate(rank)
                )
            )
            assert held
    assert all((count == 1).all() for count in counts)


@given(tables())
def test_the_first_rank_finds_what_each_rank_writes(found):
    table, ranks = found
    plan = plan_divided([(table, ranks)], {})
    parts, assignment = plan.expand()
    for rank in ranks:
        rows = assignment.of_rank(rank).row
        expected = [(plan.tensors[part.tensor].key, part.box.offset, part.box.shape) for part in plan.parts_of(rank)]
        axes = parts.num_axes[rows].tolist()
        boxes = zip(parts.offset[rows].tolist(), parts.shape[rows].tolist(), axes, strict=True)
        keys = [parts.keys[key] for key in parts.key[rows]]
        assert [
            (key, tuple(offset[:num]), tuple(shape[:num]))
            for key, (offset, shape, num) in zip(keys, boxes, strict=True)
        ] == expected


def test_copies_write_as_much_as_each_other():
    placed = division((64, 64), (2, 4), [Replicate(), Shard(0)])
    table = DividedTable(tuple(described(f"t{number}", (64, 64 + number % 7), placed) for number in range(40)))
    plan = plan_divided([(table, list(range(8)))], {})
    sizes = [sum(math.prod(part.box.shape) for part in plan.parts_of(rank)) for rank in range(8)]
    assert max(sizes) < 1.1 * min(sizes)


def test_a_large_tensor_is_cut_among_its_copies():
    placed = division((6000, 1000), (3,), [Replicate()])
    plan = plan_divided([(DividedTable((described("w", (6000, 1000), placed),)), [0, 1, 2])], {})
    assert [[part.box.shape for part in plan.parts_of(rank)] for rank in range(3)] == [[(2000, 1000)]] * 3


def test_tensors_with_one_memory_are_written_once():
    placed = division((4,), (2,), [Shard(0)])
    table = DividedTable((described("a", (4,), placed), described("b", (4,), placed, alias_of="a")), {"d": "c"})
    plan = plan_divided([(table, [0, 1])], {"c": {0, 1}, "d": {0, 1}})
    assert [tensor.key for tensor in plan.tensors] == ["a"]
    assert plan.aliases == {"b": "a", "d": "c"}
    apart = DividedTable((described("a", (4,), placed), described("b", (4,), placed)))
    plan = plan_divided([(table, [0]), (apart, [1])], {"c": {0, 1}, "d": {0, 1}})
    assert ([tensor.key for tensor in plan.tensors], plan.aliases) == (["a", "b"], {})


def test_a_plain_tensor_is_written_by_the_first_rank_that_has_it():
    one, other = (DividedTable((described(key, (3,), UNDIVIDED),)) for key in "ab")
    plan = plan_divided([(one, [0, 2]), (other, [1, 3])], {})
    assert [[plan.tensors[part.tensor].key for part in plan.parts_of(rank)] for rank in range(4)] == [
        ["a"],
        ["b"],
        [],
        [],
    ]


def test_a_tensor_on_two_meshes_is_written_on_the_first():
    first, second = (division((4,), (2,), [Shard(0)], rank) for rank in (0, 2))
    plan = plan_divided(
        [
            (DividedTable((described("w", (4,), first),)), [0, 1]),
            (DividedTable((described("w", (4,), second),)), [2, 3]),
        ],
        {},
    )
    assert [len(list(plan.parts_of(rank))) for rank in range(4)] == [1, 1, 0, 0]
    assert plan.on_several_meshes == {"w": (first, second)}


PLACED = division((4,), (2,), [Shard(0)])
CONTRADICTIONS = {
    "rank 1 lacks it": [(DividedTable((described("w", (4,), PLACED),)), [0])],
    r"rank 0 has a DTensor of torch.float32 and shape \(4,\) and rank 1 a DTensor of torch.float64": [
        (DividedTable((described("w", (4,), PLACED),)), [0]),
        (DividedTable((described("w", (4,), PLACED, torch.float64),)), [1]),
    ],
    "and rank 1 a plain tensor of torch.float32": [
        (DividedTable((described("w", (4,), PLACED),)), [0]),
        (DividedTable((described("w", (4,), UNDIVIDED),)), [1]),
    ],
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_ranks_that_contradict_each_other_are_named(words):
    with pytest.raises(CheckpointError, match=f"^w: .*{words}"):
        plan_divided(CONTRADICTIONS[words], {})


def test_a_key_of_a_shard_is_no_key_of_a_dtensor():
    with pytest.raises(CheckpointError, match=r"^w: all shards must have one kind, .*rank 0 has a tensor .*rank 3"):
        plan_divided([(DividedTable((described("w", (4,), PLACED),)), [0, 1])], {"w": {3}})


def test_a_mesh_with_a_rank_outside_the_save_is_refused():
    class Entry:
        key, dtype, shape, alias_of = "w", torch.float32, (4,), ""
        division = Division((0, 7), (2,), ((0, 1),))

    with pytest.raises(CheckpointError, match=r"w: the ranks of its mesh must take part in the save, but rank 7 does"):
        DividedTable.of([Entry], {}, {0: 0, 1: 1})


def test_3000_tensors_on_1024_ranks_are_planned_within_seconds():
    """3.1 million boxes, which are not sent."""
    shapes = [(4096, 4096), (4096,), (11008, 4096), (4096, 11008), (128256, 4096)]
    meshes = {shape: division(shape, (1024,), [Shard(0)]) for shape in shapes}
    tensors = [
        described(f"layers.{number}.weight", shapes[number % 5], meshes[shapes[number % 5]]) for number in range(3000)
    ]
    table = DividedTable(tuple(tensors))
    start = time.process_time()
    plan = plan_divided([(table, list(range(1024)))], {})
    own = [len(list(plan.parts_of(rank))) for rank in (0, 517, 1023)]
    assert len(table.encode()) < 1 << 20
    seconds = time.process_time() - start
    parts, _ = plan.expand()
    print(f"plan {seconds:.2f} s, {len(parts):,} parts found in {time.process_time() - start - seconds:.2f} s")
    assert seconds < 3
    assert min(own) > 300
    assert len(parts) > 3_000_000
