"""What a rank has is in a main replica of some rank, or the save is refused."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trackbed.checkpoint import ShardedObject, ShardedTensor, load
from trackbed.checkpoint.plan.shard_table import join_tables, tabulate
from trackbed.checkpoint.plan.validate import find_lost
from trackbed.checkpoint.ranks import meet
from trackbed.comm import SOLO, run_ranks
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints import serialization


def box(shape, offset, whole=(8,), *, is_main=True, key="a"):
    return ShardedTensor(key, None, torch.float32, shape, whole, offset, None, 0 if is_main else 1)


def lost(*ranks):
    return find_lost(join_tables([tabulate(shards, rank) for rank, shards in enumerate(ranks)]))


def copy_of(*arguments, **options):
    return box(*arguments, **options, is_main=False)


@pytest.mark.parametrize(
    ("ranks", "region"),
    [
        ([[copy_of((8,), (0,))], [copy_of((8,), (0,))]], "[0:8], of which ranks 0, 1 have a copy"),
        ([[box((4,), (0,)), copy_of((4,), (4,))], []], "[4:8], of which rank 0 has a copy"),
        ([[box((4,), (0,))], [copy_of((8,), (0,))]], "[4:8], of which rank 1 has a copy"),
        ([[box((4,), (4,)), box((2,), (0,))], [copy_of((5,), (0,))]], "[2:4], of which rank 1 has a copy"),
        ([[box((3,), (0,)), box((4,), (2,))], [copy_of((8,), (0,))]], "[6:8], of which rank 1 has a copy"),
        ([[box((4,), (0,), (4,))], [copy_of((8,), (0,), (8,))]], "[4:8], of which rank 1 has a copy"),
        ([[copy_of((), (), ())], [copy_of((), (), ())]], "[], of which ranks 0, 1 have a copy"),
        ([[ShardedObject("a", None, (2,), (0,))], [ShardedObject("a", None, (2,), (1,), 3)]],
         "[1:2], of which rank 1 has a copy"),
        ([[ShardedObject("a", None, (1,), (0,))], [copy_of((8,), (0,))]], "[0:8], of which rank 1 has a copy"),
        ([[ShardedObject("a", None, (), (), (0, 1))], []], "[], of which rank 0 has a copy"),
    ],
)  # fmt: skip
def test_a_copy_without_a_main_replica_is_named_by_key_region_and_ranks(ranks, region):
    (found,) = lost(*ranks)
    assert found.startswith("a: what a rank has must be in a main replica of some rank, but no main replica has [")
    assert region in found


@pytest.mark.parametrize(
    "ranks",
    [
        [[], []],
        [[box((8,), (0,))], [copy_of((8,), (0,))]],
        [[box((2,), (0,))], [copy_of((2,), (0,))]],  # a part, which all ranks have
        [[box((4,), (0,)), box((4,), (4,))], [copy_of((8,), (0,)), copy_of((3,), (3,))]],
        [[box((3,), (0,)), box((5,), (3,))], [copy_of((8,), (0,))]],
        [[box((5,), (0,)), box((4,), (2,))], [copy_of((6,), (0,))]],  # main replicas that overlap
        [[box((0, 3), (0, 0), (0, 3))], [copy_of((0, 3), (0, 0), (0, 3))]],
        [[box((), (), ())], [copy_of((), (), ())]],
        [[ShardedObject("a", None, (2,), (0,))], [ShardedObject("a", None, (2,), (0,), 1)]],
    ],
)
def test_parts_that_no_rank_has_and_copies_of_other_boxes_are_right(ranks):
    assert lost(*ranks) == []


boxes = st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 5))] * 2, st.booleans()), max_size=6)


@given(boxes, boxes)
def test_a_copy_is_lost_if_an_element_of_it_is_in_no_main_replica(one, other):
    whole = (5, 5)
    painted, offered = np.zeros(whole, dtype=bool), np.zeros(whole, dtype=bool)
    ranks = []
    for shards in (one, other):
        ranks.append([])
        for (row, height), (column, width), is_main in shards:
            size = (min(height, 5 - row), min(width, 5 - column))
            ranks[-1].append(box(size, (row, column), whole, is_main=is_main))
            (painted if is_main else offered)[row : row + size[0], column : column + size[1]] = True
    assert bool(lost(*ranks)) == bool((offered & ~painted).any())


def test_a_hundred_thousand_copies_are_checked_at_once():
    """The normal case of a sharded optimizer, whose boxes are parts, on 100 ranks."""
    rows = [box((1,), (number,), (500,), key=f"k{key}", is_main=False) for key in range(2) for number in range(500)]
    mains = [box((1,), (number,), (500,), key=f"k{key}") for key in range(2) for number in range(500)]
    tables = [tabulate(mains, 0), *(tabulate(rows, rank) for rank in range(1, 100))]
    table = join_tables(tables)
    start = time.perf_counter()
    assert find_lost(table) == []
    assert time.perf_counter() - start < 0.5


def tensor(key, rank, value=1.0, replica_id=None):
    return ShardedTensor.from_rank_offsets(key, torch.full((4,), value), replica_id=rank if replica_id is None else 1)


def saved(state, path, *, asynchronous=False, group=SOLO):
    """Saves without the check that main replicas cover each tensor."""
    with meet("save", group):
        request = serialization.save(state, path, validate_access_integrity=False, async_sharded_save=asynchronous)
        if asynchronous:
            request.execute_sync()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_save_that_would_lose_a_tensor_is_refused_on_every_rank_before_anything_is_written(
    tmp_path, size, asynchronous
):
    def work(group):
        state = {"w": tensor("w", group.rank, replica_id=1), "v": tensor("v", group.rank)}
        words = r"w: what a rank has must be in a main replica of some rank, but no main replica has \[0:4\]"
        with pytest.raises(CheckpointError, match=words):
            saved(state, tmp_path / "saved", asynchronous=asynchronous, group=group)

    run_ranks(size, work)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_would_lose_an_object_is_refused(tmp_path):
    state = {"w": tensor("w", 0), "o": ShardedObject("o", 7, (1,), (0,), replica_id=2)}
    with pytest.raises(CheckpointError, match="o: what a rank has must be in a main replica of some rank"):
        saved(state, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_loses_its_main_replica_after_a_save_is_refused_then(tmp_path):
    """The plan of the save before is not used again."""

    def work(group):
        for step in range(2):
            saved({"w": tensor("w", group.rank, step)}, tmp_path / str(step), group=group)
        with pytest.raises(CheckpointError, match="w: what a rank has"):
            saved({"w": tensor("w", group.rank, replica_id=1)}, tmp_path / "2", group=group)
        saved({"w": tensor("w", group.rank, 3.0)}, tmp_path / "3", group=group)
        found = load({"w": tensor("w", group.rank, 0.0)}, tmp_path / "3", group=group)
        assert found["w"].tolist() == [3.0] * 4

    run_ranks(2, work)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "3"]


def test_a_part_of_a_checkpoint_is_saved_with_copies_of_other_boxes(tmp_path):
    """Rank 0 has the halves of the first eight rows of twelve, and rank 1 a copy of six of them."""

    def work(group):
        if group.rank:
            own = {"w": ShardedTensor("w", torch.arange(6.0), torch.float32, (6,), (12,), (1,), None, 1)}
        else:
            halves = [torch.arange(4.0), torch.arange(4.0, 8.0)]
            own = {
                str(number): ShardedTensor("w", half, torch.float32, (4,), (12,), (4 * number,), None)
                for number, half in enumerate(halves)
            }
        saved(own, tmp_path / "saved", group=group)
        target = ShardedTensor("w", torch.zeros(8), torch.float32, (8,), (12,), (0,), None)
        found = load({"w": target}, tmp_path / "saved", allow_parts=True, group=group)
        assert found["w"].tolist() == list(range(8))

    run_ranks(2, work)
