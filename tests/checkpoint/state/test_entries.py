"""Entries of sharded state dictionaries."""

import pytest
import torch

from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject, ShardedObject
from trackbed.checkpoint.state.sharded_tensor import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
    is_main_replica,
)
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.megatron.checkpoints.entries import apply_factories


def test_a_box_of_a_regular_grid_knows_its_place():
    box = ShardedTensor.from_rank_offsets(
        "w", torch.zeros(2, 3), (0, 4, 6), (2, 1, 5), replica_id=(0, 1), prepend_axis_num=1
    )
    assert (box.global_shape, box.global_offset, box.axis_fragmentations) == ((6, 2, 15), (4, 0, 3), (6, 1, 5))
    assert (box.local_shape, box.dtype, box.has_regular_grid) == ((2, 3), torch.float32, True)
    assert box.global_slice() == (4, slice(0, 2), slice(3, 6))
    assert box.local_chunk_offset_in_global() == (4, 0, 1)
    assert box.max_allowed_chunks() == (1, 2, 3)
    assert box.without_data().data is None
    assert box.data is not None


def test_a_box_may_have_no_elements():
    box = ShardedTensor.from_rank_offsets("w", torch.zeros(0, 3), (0, 1, 2))
    assert (box.global_shape, box.local_chunk_offset_in_global()) == ((0, 3), (0, 0))


@pytest.mark.parametrize("triple", [(2, 0, 1), (-1, 0, 1), (0, 2, 2), (0, -1, 2), (0, 0, 0)])
def test_a_place_outside_the_grid_is_refused(triple):
    with pytest.raises(CheckpointError, match=r"^w: rank_offsets must have an axis below 2"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), triple)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.float64}, "the dtype of data must be torch.float64, but is torch.float32"),
        ({"local_shape": (2,)}, r"the shape of data must be \(2,\), but is \(2, 3\)"),
        ({"global_offset": (0,)}, "the number of axes of global_offset must be 2, but is 1"),
        ({"global_shape": (2, 3, 4)}, "the number of axes of global_shape must be 2, but is 3"),
        ({"global_offset": (1, 0)}, "each offset in a regular grid must be a multiple of 2, but is 1"),
        ({"flattened_range": slice(0, 1)}, "flattened_range must be None"),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(changes, words):
    fields = {
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (2, 3),
        "global_offset": (0, 0),
        "axis_fragmentations": (1, 1),
    }
    with pytest.raises(CheckpointError, match=f"^w: {words}"):
        ShardedTensor("w", torch.zeros(2, 3), **{**fields, **changes})


def test_a_flattened_range_is_an_argument_error():
    with pytest.raises(ArgumentError, match="flattened_range must be None"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), flattened_range=slice(0, 1))


def test_data_is_made_only_where_there_is_none():
    box = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3)).without_data()
    box.init_data("cpu", torch.ones)
    assert box.data.tolist() == [[1.0] * 3] * 2
    box.init_data("cpu", torch.zeros)
    assert box.data.any()


def test_all_boxes_of_a_grid_are_narrowed_alike():
    box = ShardedTensor.from_rank_offsets("w", torch.arange(12.0).view(4, 3), (1, 1, 2), prepend_axis_num=1)
    (narrowed,) = box.narrow(0, 1, 2)
    assert (narrowed.local_shape, narrowed.global_shape, narrowed.global_offset) == (
        (2, 3),
        (1, 4, 3),
        (0, 2, 0),
    )
    assert narrowed.data.tolist() == [[3, 4, 5], [6, 7, 8]]


def test_main_replicas_are_those_of_zeros():
    assert [is_main_replica(number) for number in (0, 1, (0, 0), (0, 2), ())] == [True, False, True, False, True]


@pytest.mark.parametrize("key", ["rng", "a/b", "a/shard_1/b", "x.y_z"])
def test_an_object_is_described_by_its_name(key):
    one = ShardedObject(key, {"x": 1}, (2, 3), (1, 2), replica_id=4)
    assert one.unique_key == f"{key}/shard_1.2_2.3"
    found = ShardedObject.empty_from_unique_key(one.unique_key, 4)
    assert found == one.without_data()
    assert ShardedObject.empty_from_unique_key(f"{key}/shard_1.2_2").global_shape == (2, -1)


@pytest.mark.parametrize("name", ["rng", "rng/shard_", "rng/shard_1", "rng/shard_a_b", "rng/shard_1._2", ""])
def test_other_names_are_refused(name):
    with pytest.raises(CheckpointError, match=r"^name of an object must be KEY/shard_OFFSET_SHAPE"):
        ShardedObject.empty_from_unique_key(name)


def test_factories_build_and_merge_at_any_depth():
    def build(key, data, replica_id, flattened_range):
        return {
            half: ShardedTensor.from_rank_offsets(f"{key}.{half}", part)
            for half, part in zip("lr", data.chunk(2), strict=True)
        }

    def merge(found):
        return torch.cat([found["l"], found["r"]])

    factory = ShardedTensorFactory("w", torch.arange(4), build, merge)
    state = {"a": [factory, {"b": factory}], "c": LocalNonpersistentObject(3)}
    apply_factories(state)
    assert state["a"][0]["r"].key == "w.r"
    assert state["c"].unwrap() == 3
    loaded = {
        "a": [{"l": torch.tensor([1]), "r": torch.tensor([2])}, {"b": {"l": torch.tensor([3]), "r": torch.tensor([4])}}]
    }
    apply_factory_merges(loaded, {"a": {0: factory, 1: {"b": factory}}})
    assert loaded["a"][0].tolist() == [1, 2]
    assert loaded["a"][1]["b"].tolist() == [3, 4]
    with pytest.raises(ValueError, match=r"must have a value at \('a', 2\)"):
        apply_factory_merges(loaded, {"a": {2: factory}})
    with pytest.raises(ValueError, match=r"at \('c',\) must have the structure of its factories"):
        apply_factory_merges({"c": 3}, {"c": {"x": factory}})
