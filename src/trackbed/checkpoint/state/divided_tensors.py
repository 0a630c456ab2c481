"""Tensors that each rank has a known place of: `DTensor`s, and plain tensors beside them, which each rank has whole.

Along each axis a rank has some of the indices: a `Shard` gives it the part that `torch.chunk` does, of those that the
placements before have left; a `_StridedShard`, which PyTorch uses where FSDP divides what tensor parallelism has
divided, gives it that part of each of several equal pieces. Indices in a row are a run, and a box is one run of each
axis.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch

from trackbed.checkpoint.state.sharded_tensor import ShardedBase, ShardedTensor, ShardedTensorFactory
from trackbed.errors import CheckpointError

Numbers = tuple[int, ...]
Runs = list[tuple[int, int]]
"""First index and end of each of some runs, in the order in which a rank has them."""
_REPLICATED: Final = -1
"""In the place of the axis that is divided: none is."""


class LocalBox(NamedTuple):
    """Box of a tensor that is in one rank's part."""

    offset: Numbers
    """First element in the whole tensor."""
    local_offset: Numbers
    """First element in the part."""
    shape: Numbers


class Division(NamedTuple):
    """Division of a tensor among the ranks of a mesh."""

    ranks: Numbers
    """Ranks of the mesh, in row-major order."""
    mesh_shape: Numbers
    """Number of ranks along each axis of the mesh."""
    placements: tuple[tuple[int, int], ...]
    """For each axis of the mesh: the axis of the tensor that it divides, -1 for none; and the number of equal pieces of
    each of which a rank has a part, 1 but for `_StridedShard`."""

    def coordinate(self, rank: int) -> Numbers | None:
        """Place of a rank in the mesh; None if it is not there."""
        if rank not in self.ranks:
            return None
        number, place = self.ranks.index(rank), list[int]()
        for size in reversed(self.mesh_shape):
            number, along = divmod(number, size)
            place.append(along)
        return tuple(place[::-1])

    def num_copies(self) -> int:
        """Number of ranks that have each box."""
        return prod(size for size, (axis, _) in zip(self.mesh_shape, self.placements, strict=True) if axis < 0)

    def copy_number(self, coordinate: Sequence[int]) -> int:
        """Number of the copies of a rank, from 0."""
        number = 0
        for size, place, (axis, _) in zip(self.mesh_shape, coordinate, self.placements, strict=True):
            if axis < 0:
                number = number * size + place
        return number

    def boxes(self, shape: Sequence[int], coordinate: Sequence[int]) -> list[LocalBox]:
        """Boxes of a tensor that are in one rank's part, in the order of their elements there."""
        runs: list[Runs] = [[(0, size)] for size in shape]
        for count, place, (axis, pieces) in zip(self.mesh_shape, coordinate, self.placements, strict=True):
            if axis >= 0 and pieces == 1:
                runs[axis] = _chunk(runs[axis], count, place)
            elif axis >= 0:
                runs[axis] = _joined(
                    run for number in range(pieces) for run in _chunk(_chunk(runs[axis], pieces, number), count, place)
                )
        spans = [_with_local_starts(of_axis) for of_axis in runs]
        return [
            LocalBox(*(tuple(part[column] for part in box) for column in range(3))) for box in itertools.product(*spans)
        ]


UNDIVIDED: Final = Division((), (), ())
"""Division of a tensor that each rank has whole."""
_places: Final[WeakKeyDictionary[Any, dict[Any, tuple[Division, Numbers | None]]]] = WeakKeyDictionary()
"""Results of `_place_of`, by mesh."""


def division_of(shape: Sequence[int], ranks: Sequence[int], mesh_shape: Sequence[int], placements: Any) -> Division:
    """Returns a division from torch's placements.

    Args:
        shape: shape of the whole tensor.
        ranks: ranks of the mesh, in row-major order.
        mesh_shape: number of ranks along each axis of the mesh.
        placements: torch's placement for each axis of the mesh: `Shard`, `_StridedShard` or `Replicate`.

    Raises:
        CheckpointError: a placement is of another kind, such as `Partial`.
    """
    found = []
    for placement in placements:
        kind = type(placement).__name__
        if kind == "Replicate":
            found.append((_REPLICATED, 1))
        elif kind in ("Shard", "_StridedShard"):
            pieces = placement.split_factor if kind == "_StridedShard" else 1
            found.append((placement.dim % len(shape), pieces))
        else:
            raise CheckpointError(
                f"a DTensor must be placed by Shard or Replicate to be stored, found {placement!r}: redistribute it"
            )
    return Division(tuple(ranks), tuple(mesh_shape), tuple(found))


def local_boxes(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[LocalBox]:
    """Returns the boxes of a tensor that are in one rank's part, in the order of their elements there. Pure.

    Args:
        shape: shape of the whole tensor.
        mesh_shape: number of ranks along each axis of the mesh.
        coordinate: place of the rank in the mesh.
        placements: torch's placement for each axis of the mesh; see `division_of`.

    >>> from torch.distributed.tensor import Shard
    >>> local_boxes((5, 2), (2,), (1,), [Shard(0)])
    [LocalBox(offset=(3, 0), local_offset=(0, 0), shape=(2, 2))]
    """
    return division_of(shape, (), mesh_shape, placements).boxes(shape, coordinate)


@dataclass
class DividedTensor(ShardedBase):
    """Entry of a `DTensor` that is saved, or of a plain tensor beside it.

    Args:
        key: its key.
        data: this rank's part.
        dtype: type of the elements.
        shape: shape of the whole tensor.
        division: how it is divided.
        boxes: the boxes that are in this rank's part.
        alias_of: key of an earlier entry with the same memory; empty if there is none.
        path: path in the state, of a plain tensor.
    """

    key: str
    data: torch.Tensor
    dtype: torch.dtype
    shape: Numbers
    division: Division
    boxes: list[LocalBox]
    alias_of: str = ""
    path: tuple[Any, ...] = ()
    replica_id: int = 0

    def validate_metadata_integrity(self) -> None:
        """Does nothing: the fields are read from a tensor."""

    def without_data(self) -> Self:
        """Returns the entry: it is not kept beyond a save."""
        return self


@dataclass
class TensorElsewhere(ShardedBase):
    """Entry of a `DTensor` on a rank outside its mesh, which has nothing of it."""

    key: str
    data: Any
    replica_id: int = 0

    def validate_metadata_integrity(self) -> None:
        """Does nothing: the fields are read from a tensor."""

    def without_data(self) -> Self:
        """Returns the entry: it is not kept beyond a save."""
        return self


@dataclass
class PartOfDivided(ShardedTensor):
    """Box of a `DTensor` that is loaded, or of a plain tensor beside it."""

    has_copies: bool = False
    """True if other ranks have it, too."""
    is_elsewhere: bool = False
    """True on a rank outside the mesh, which has nothing of it."""
    is_plain: bool = False
    """True for a plain tensor, which may be stored as a plain value instead."""
    path: tuple[Any, ...] = ()
    """Path in the state, of a plain tensor."""


def is_divided(value: Any) -> bool:
    """True for a `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")  # without which there is none
    return module is not None and isinstance(value, module.DTensor)


def divided_tensor(value: Any, key: str) -> DividedTensor | None:
    """Entry of a `DTensor`; None on a rank outside its mesh, where nothing of it is known for certain.

    Args:
        value: the `DTensor`.
        key: its key.

    Raises:
        CheckpointError: its placements, or the class of its part, cannot be stored.
    """
    shape = tuple(value.shape)
    try:
        division, coordinate = _place_of(value.device_mesh, value.placements, shape)
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {error}") from None
    if coordinate is None:
        return None
    local = value._local_tensor.detach()
    if type(local) is not torch.Tensor:
        raise CheckpointError(
            f"{key}: the local part of a DTensor must be a plain tensor, but is of {type(local).__name__}: describe it "
            "with trackbed.ShardedTensor"
        )
    if local.is_meta:
        raise CheckpointError(
            f'{key}: must have memory, but lies on the meta device: call to_empty(device="cpu") of its module first, '
            "or that of the GPU"
        )
    boxes = division.boxes(shape, coordinate)
    if sum(prod(box.shape) for box in boxes) != local.numel():
        raise CheckpointError(
            f"{key}: the local part of a DTensor of shape {shape} in {value.placements} must have the elements of "
            f"{[(box.offset, box.shape) for box in boxes]}, but has the shape {tuple(local.shape)}"
        )
    return DividedTensor(key, local, local.dtype, shape, division, boxes)


def _place_of(mesh: Any, placements: tuple[Any, ...], shape: Numbers) -> tuple[Division, Numbers | None]:
    """Division of a tensor on a mesh, and this rank's place there. Meshes are slow to ask, and few."""
    known = _places.setdefault(mesh, {})
    found = known.get((placements, len(shape)))
    if found is None:
        place = mesh.get_coordinate()
        ranks, mesh_shape = mesh.mesh.flatten().tolist(), tuple(mesh.shape)
        # On a rank outside of the mesh the shape of a tensor may be anything.
        division = division_of(shape, ranks, mesh_shape, placements) if place is not None else UNDIVIDED
        found = known[placements, len(shape)] = division, None if place is None else tuple(place)
    return found


def undivided_tensor(value: torch.Tensor, path: tuple[Any, ...]) -> DividedTensor:
    """Entry of a plain tensor, whose key is its path, as that of a `DTensor`."""
    shape = tuple(value.shape)
    whole = LocalBox((0,) * len(shape), (0,) * len(shape), shape)
    return DividedTensor(key_of(path), value.detach(), value.dtype, shape, UNDIVIDED, [whole], path=path)


def key_of(path: tuple[Any, ...]) -> str:
    """Key of a tensor with a path in the state, as in DCP."""
    return ".".join(map(str, path))


def parts_to_load(entry: DividedTensor | None, value: Any, key: str) -> ShardedTensorFactory:
    """Entries for the boxes of a tensor, whose data are views of this rank's part. Loading them gives `value` back.

    There is one at least, if only without elements, so that all ranks have the same structure.

    Args:
        entry: entry of the tensor; None if this rank has nothing of it.
        value: the tensor.
        key: its key.
    """
    if entry is None:
        nothing = torch.empty(0, dtype=value.dtype, device="cpu")
        elsewhere = PartOfDivided(key, nothing, value.dtype, (0,), (0,), (0,), None, is_elsewhere=True)
        return ShardedTensorFactory(key, nothing, lambda *_: {0: elsewhere}, lambda _: value)
    has_copies = entry.division == UNDIVIDED or entry.division.num_copies() > 1
    boxes = [box for box in entry.boxes if 0 not in box.shape] or entry.boxes[:1]
    entries = {
        number: PartOfDivided(
            entry.key,
            view_of(entry.data, box),
            entry.dtype,
            box.shape,
            entry.shape,
            box.offset,
            None,
            has_copies=has_copies,
            is_plain=entry.division == UNDIVIDED,
            path=entry.path,
        )
        for number, box in enumerate(boxes)
    }
    return ShardedTensorFactory(entry.key, entry.data, lambda *_: entries, lambda _: value)


def view_of(local: torch.Tensor, box: LocalBox) -> torch.Tensor:
    """The elements of a box in a rank's part."""
    return local[tuple(slice(low, low + size) for low, size in zip(box.local_offset, box.shape, strict=True))]


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
