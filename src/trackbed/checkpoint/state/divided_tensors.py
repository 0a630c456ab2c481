"""Entries for `DTensor`s: the boxes of the whole tensor that a rank has.

Along each axis a rank has some of the indices: a `Shard` gives it the part that `torch.chunk` does, of those that the
placements before have left; a `_StridedShard`, which PyTorch uses where FSDP divides what tensor parallelism has
divided, gives it that part of each of several equal pieces. Indices in a row are a run, and a box is one run of each
axis.
"""

import itertools
import sys
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, ShardedTensorFactory
from trackbed.errors import CheckpointError

Numbers = tuple[int, ...]
Runs = list[tuple[int, int]]
"""First index and end of each of some runs, in the order in which a rank has them."""


class LocalBox(NamedTuple):
    """Box of a tensor that is in one rank's part."""

    offset: Numbers
    """First element in the whole tensor."""
    local_offset: Numbers
    """First element in the part."""
    shape: Numbers


def is_divided(value: Any) -> bool:
    """True for a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # without which there is none
    return module is not None and isinstance(value, module.DTensor)


def local_boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[LocalBox]:
    """Returns the boxes of a tensor that are in one rank's part, in the order of their elements there. Pure.

    Args:
        shape: shape of the whole tensor.
        mesh_shape: number of ranks along each axis of the mesh.
        coordinate: place of the rank in the mesh.
        placements: torch's placement for each axis of the mesh: `Shard`, `_StridedShard` or `Replicate`.

    Raises:
        CheckpointError: a placement is of another kind, such as `Partial`.

    >>> from torch.distributed.tensor import Shard
    >>> local_boxes((5, 2), (2,), (1,), [Shard(0)])
    [LocalBox(offset=(3, 0), local_offset=(0, 0), shape=(2, 2))]
    """
    runs: list[Runs] = [[(0, size)] for size in shape]
    for count, place, placement in zip(mesh_shape, coordinate, placements, strict=True):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise CheckpointError(
                f"a DTensor must be placed by Shard or Replicate to be stored, found {placement!r}: redistribute it"
            )
        axis = placement.dim % len(shape)
        pieces = placement.split_factor if kind == "_StridedShard" else 1
        runs[axis] = _joined(
            run for number in range(pieces) for run in _chunk(_chunk(runs[axis], pieces, number), count, place)
        )
    spans = [_with_local_starts(of_axis) for of_axis in runs]
    return [
        LocalBox(*(tuple(part[column] for part in box) for column in range(3))) for box in itertools.product(*spans)
    ]


def describe_divided(value: Any, key: str) -> ShardedTensor | ShardedTensorFactory | LocalNonpersistentObject:
    """Entry of a `DTensor`, whose data are views of this rank's part. Loading it fills that part, and gives it back.

    Args:
        value: the `DTensor`.
        key: its key.

    Raises:
        CheckpointError: its placements, or the class of its part, cannot be stored.
    """
    mesh, placements = value.device_mesh, value.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the mesh
        return LocalNonpersistentObject(value)
    local = value.detach()._local_tensor
    if type(local) is not torch.Tensor:
        raise CheckpointError(
            f"{key}: the local part of a DTensor must be a plain tensor, but is of {type(local).__name__}: describe it "
            "with trackbed.ShardedTensor"
        )
    shape, mesh_shape = tuple(value.shape), tuple(mesh.shape)
    try:
        boxes = local_boxes(shape, mesh_shape, coordinate, placements)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None
    if sum(prod(box.shape) for box in boxes) != local.numel():
        raise CheckpointError(
            f"{key}: the local part of a DTensor of shape {shape} in {placements} must have the elements of "
            f"{[(box.offset, box.shape) for box in boxes]}, but has the shape {tuple(local.shape)}"
        )
    copies = [
        place
        for place, placement in zip(coordinate, placements, strict=True)
        if type(placement).__name__ == "Replicate"
    ]
    entries = {
        number: ShardedTensor(
            key,
            local[tuple(slice(low, low + size) for low, size in zip(box.local_offset, box.shape, strict=True))],
            local.dtype,
            box.shape,
            shape,
            box.offset,
            None,
            tuple(copies) or 0,
        )
        for number, box in enumerate(boxes)
        if 0 not in box.shape or (0 in shape and not any(coordinate))
    }
    if not entries:
        return LocalNonpersistentObject(value)
    return ShardedTensorFactory(key, local, lambda *_: entries, lambda _: value)


def _chunk(runs: Runs, count: int, place: int) -> Runs:
    """The indices that `torch.chunk` into `count` parts gives the one at a place."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // count)
    low, high = min(total, place * size), min(total, (place + 1) * size)
    kept, passed = Runs(), 0
    for start, stop in runs:
        first, end = max(start, start + low - passed), min(stop, start + high - passed)
        if first < end:
            kept.append((first, end))
        passed += stop - start
    return kept


def _joined(runs: Any) -> Runs:
    """Runs of which none begins where the one before ends."""
    joined = Runs()
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _with_local_starts(runs: Runs) -> list[tuple[int, int, int]]:
    """First index of each run, its place in the rank's part, and its length; an empty run if there is none."""
    spans, passed = list[tuple[int, int, int]](), 0
    for start, stop in runs:
        spans.append((start, passed, stop - start))
        passed += stop - start
    return spans or [(0, 0, 0)]
