"""The boxes of a DTensor that a rank has, against an oracle that cuts lists of indices."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.checkpoints.divided import Layout, coordinates, layouts, part_of
from trackbed.checkpoint.state.divided_tensors import local_boxes
from trackbed.errors import CheckpointError

MESHES = [shape for axes in range(1, 5) for shape in itertools.product((1, 2, 3, 4), repeat=axes)]


@given(data=st.data(), shape=st.lists(st.integers(0, 9), max_size=3))
def test_boxes_are_the_elements_of_the_part(data, shape):
    layout = data.draw(layouts(len(shape), MESHES))
    whole = np.arange(math.prod(shape)).reshape(shape)
    for coordinate in coordinates(layout):
        expected = part_of(whole, layout, coordinate)
        found = np.full(expected.shape, -1)
        boxes = local_boxes(shape, layout.mesh_shape, coordinate, layout.placements)
        for box in boxes:
            there = tuple(slice(low, low + size) for low, size in zip(box.offset, box.shape, strict=True))
            here = tuple(slice(low, low + size) for low, size in zip(box.local_offset, box.shape, strict=True))
            assert (found[here] == -1).all()
            found[here] = whole[there]
        assert np.array_equal(found, expected)
        if not any(isinstance(placement, _StridedShard) for placement in layout.placements):
            assert len(boxes) == 1


def test_meshes_of_thousands_of_ranks_and_large_axes():
    layout = Layout((8, 8, 8, 8), (_StridedShard(0, split_factor=64), Shard(0), Shard(0), Replicate()))
    total = 0
    for coordinate in coordinates(layout):
        boxes = local_boxes((1 << 40, 5), layout.mesh_shape, coordinate, layout.placements)
        assert 1 <= len(boxes) <= 64
        total += sum(box.shape[0] for box in boxes) if coordinate[3] == 0 else 0
    assert total == 1 << 40


def test_fsdp_over_tensor_parallel_is_one_box():
    layout = Layout((2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    boxes = [local_boxes((8, 8), layout.mesh_shape, place, layout.placements) for place in coordinates(layout)]
    assert [[box.offset for box in found] for found in boxes] == [[(0, 0)], [(4, 0)], [(2, 0)], [(6, 0)]]


@pytest.mark.parametrize("placement", [Partial(), object()])
def test_other_placements_are_refused(placement):
    with pytest.raises(CheckpointError, match="a DTensor must be placed by Shard or Replicate to be stored, found"):
        local_boxes((4,), (2,), (0,), [placement])
