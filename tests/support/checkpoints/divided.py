"""DTensors in generated layouts, and an oracle that cuts each rank's part index by index."""

import itertools
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


class Layout(NamedTuple):
    """Mesh of the first ranks, and a placement for each of its axes."""

    mesh_shape: tuple[int, ...]
    placements: tuple[object, ...]


def chunks(indices, count):
    """The parts of a list of indices that `torch.chunk` makes, some of which may be empty."""
    size = -(-len(indices) // count)
    return [indices[place * size : (place + 1) * size] for place in range(count)]


def part_of(whole, layout, coordinate):
    """Elements of an array that the rank at some place of the mesh has."""
    axes = [list(range(size)) for size in whole.shape]
    for count, place, placement in zip(layout.mesh_shape, coordinate, layout.placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        axis = placement.dim % whole.ndim
        pieces = chunks(axes[axis], placement.split_factor) if isinstance(placement, _StridedShard) else [axes[axis]]
        axes[axis] = [index for piece in pieces for index in chunks(piece, count)[place]]
    return whole[np.ix_(*axes)] if whole.ndim else whole


def placements(num_axes):
    """Placements of a tensor with some axes."""
    kinds = [st.just(Replicate())]
    if num_axes:
        axis = st.integers(0, num_axes - 1)
        kinds.append(st.builds(Shard, axis))
        kinds.append(st.builds(lambda dim, pieces: _StridedShard(dim, split_factor=pieces), axis, st.integers(1, 4)))
    return st.one_of(kinds)


@st.composite
def layouts(draw, num_axes, mesh_shapes):
    """Layouts of a tensor with some axes, on one of some meshes."""
    mesh_shape = draw(st.sampled_from(mesh_shapes))
    return Layout(mesh_shape, tuple(draw(placements(num_axes)) for _ in mesh_shape))


def coordinates(layout):
    """Places of the mesh."""
    return itertools.product(*map(range, layout.mesh_shape))
