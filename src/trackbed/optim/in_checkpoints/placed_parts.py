"""Places of parameters in stored tensors: their own, or those that a model's `sharded_state_dict()` describes.

Under tensor parallelism a parameter is a part of a larger tensor; equal layers may be stacked to one tensor, with a
further axis; and a factory may store a parameter as several parts, each in its own place. The state of its optimizer,
which has the shape of the parameter, lies in the same places.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from operator import add, eq, gt, sub
from typing import Any, Final

import torch

from trackbed.checkpoint import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory, boxes
from trackbed.checkpoint.state.sharded_tensor import ReplicaId, check_key
from trackbed.checkpoint.state.tree import nested_values
from trackbed.errors import ArgumentError
from trackbed.kernels.integers import is_integer

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """Box of a parameter, and its place in a stored tensor."""

    key: str
    """Key of the stored tensor."""
    first: Numbers
    """First element of the box in the parameter."""
    shape: Numbers
    """Shape of the box."""
    global_shape: Numbers
    """Shape of the stored tensor, with prepended axes."""
    offset: Numbers
    """First element of the box in the stored tensor, with prepended axes."""
    replica_id: ReplicaId = 0
    allow_shape_mismatch: bool = False

    def index(self) -> tuple[slice, ...]:
        """Index of the box in the parameter."""
        return tuple(map(slice, self.first, map(add, self.first, self.shape)))

    def entry(self, key: str, data: torch.Tensor, first: Numbers, replica_id: ReplicaId) -> ShardedTensor:
        """Describes a tensor that has a part of the box.

        Args:
            key: key of the tensor in which it is stored.
            data: the part.
            first: its first element in the parameter.
            replica_id: see `ShardedTensor`.
        """
        axes = len(self.offset) - len(self.shape)
        offset = self.offset[:axes] + tuple(map(add, self.offset[axes:], map(sub, first, self.first)))
        return ShardedTensor(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            self.global_shape,
            offset,
            None,
            replica_id,
            prepend_axis_num=axes,
            allow_shape_mismatch=self.allow_shape_mismatch,
        )


Places = Mapping[str, Sequence[PlacedPart]]
"""Places of parameters by name. A name that is not there is the key of a tensor with the shape of its parameter."""
NO_PLACES: Final[Places] = {}


def parts_of_parameter(name: str, shape: Numbers, places: Places, replica_id: ReplicaId = 0) -> Sequence[PlacedPart]:
    """Places of a parameter, which is the whole stored tensor unless it has others.

    Args:
        name: name of the parameter.
        shape: its shape.
        places: places of parameters.
        replica_id: see `ShardedTensor`; of a parameter without other places.
    """
    zeros = (0,) * len(shape)
    return places.get(name) or [PlacedPart(name, zeros, shape, shape, zeros, replica_id)]


def entries_of_range(
    parts: Sequence[PlacedPart],
    key_of: Callable[[str], str],
    flat: torch.Tensor,
    shape: Numbers,
    span: tuple[int, int],
    replica_of: Callable[[ReplicaId], ReplicaId] = lambda own: own,
) -> dict[str, ShardedTensor]:
    """Entries for a range of the elements of a tensor with the shape of a parameter, which are boxes of it.

    Args:
        parts: places of the parameter.
        key_of: gives the key of the tensor from that of the parameter.
        flat: the elements of the range, in row-major order.
        shape: shape of the parameter.
        span: first element of the range, and the element after its last one.
        replica_of: gives the number of the copy from that of the parameter.
    """
    entries: dict[str, ShardedTensor] = {}
    place = 0
    found = boxes(shape, *span) or ([((0,) * len(shape), shape)] if 0 in shape else [])
    for first, size in found:
        data = flat[place : place + prod(size)].view(size)
        place += prod(size)
        for part in parts:
            low = tuple(map(max, first, part.first))
            high = tuple(map(min, map(add, first, size), map(add, part.first, part.shape)))
            if any(map(gt, low, high)) or (0 not in shape and any(map(eq, low, high))):
                continue
            inside = data[tuple(map(slice, map(sub, low, first), map(sub, high, first)))]
            key, replica_id = key_of(part.key), replica_of(part.replica_id)
            entries[str(len(entries))] = part.entry(key, inside, low, replica_id)
    return entries


def as_vector(key: str, parts: Mapping[str, ShardedTensor], flat: torch.Tensor) -> ShardedTensorFactory:
    """Entry of boxes that are views of one vector, which is what is loaded."""
    return ShardedTensorFactory(key, flat, lambda *_: parts or LocalNonpersistentObject(None), lambda _: flat)


def places_of_entries(entries: Mapping[str, Any], params: Mapping[str, torch.Tensor]) -> dict[str, list[PlacedPart]]:
    """Places of parameters that entries describe.

    Args:
        entries: entry of each parameter, by its name in `state_dict()`; further ones are left out.
        params: parameters by name, which are the data of their entries.

    Raises:
        ArgumentError: a parameter has no entry, or the entry has other data.
    """
    found: dict[str, list[PlacedPart]] = {}
    for name, param in params.items():
        entry = entries.get(name)
        if entry is None:
            raise ArgumentError(f"entries: must have an entry for each parameter and buffer, but have none for {name}")
        if hasattr(entry, "build_fn"):
            found[name] = [_part_of(name, one, param) for one in nested_values([entry.build()]) if is_tensor(one)]
            if not found[name] or not _has_each_once(found[name], param):
                raise ArgumentError(f"entries: what the factory of {name} builds must have each of its elements once")
        elif is_tensor(entry):
            found[name] = [_part_of(name, entry, param)]
            if found[name][0].shape != tuple(param.shape):
                raise _other_data(name, param)
        else:
            raise ArgumentError(
                f"entries: must be a ShardedTensor or ShardedTensorFactory for {name}, found {type(entry).__name__}"
            )
    return found


def is_tensor(entry: Any) -> bool:
    """True for a `ShardedTensor`, of Trackbed or of Megatron Core."""
    return hasattr(entry, "global_offset") and hasattr(entry, "local_shape")


def _has_each_once(parts: Sequence[PlacedPart], param: torch.Tensor) -> bool:
    """True if boxes have each element of a parameter once: as many as it has, and no two of them have a common one."""
    if sum(prod(part.shape) for part in parts) != param.numel():
        return False
    return not any(
        all(
            max(low, start) < min(low + size, start + count)
            for low, size, start, count in zip(one.first, one.shape, other.first, other.shape, strict=True)
        )
        for one, other in combinations(parts, 2)
    )


def _part_of(name: str, entry: Any, param: torch.Tensor) -> PlacedPart:
    """Place of an entry whose data is the parameter or a box of it."""
    data = entry.data
    check_key(entry.key)
    replica_id = entry.replica_id
    for number in replica_id if isinstance(replica_id, tuple) else (replica_id,):
        if not is_integer(number):
            raise ArgumentError(
                f"entries: the number of a copy must be an integer or a tuple of integers, but that of {name} is "
                f"{replica_id!r}"
            )
    if any(stride == 0 and size > 1 for stride, size in zip(param.stride(), param.shape, strict=True)):
        raise ArgumentError(f"entries: {name} must have memory for each element, but is expanded")
    if not isinstance(data, torch.Tensor) or data.dim() != param.dim() or data.dtype != param.dtype:
        raise _other_data(name, param)
    sizes = zip(data.shape, data.stride(), param.stride(), strict=True)
    is_view = all(own == other for size, own, other in sizes if size > 1)
    first, rest = [0] * param.dim(), 0
    if param.numel() and data.numel():
        rest = int(data.storage_offset() - param.storage_offset())
        is_view &= data.untyped_storage().data_ptr() == param.untyped_storage().data_ptr() and rest >= 0
        for stride, axis in sorted(zip(param.stride(), range(param.dim()), strict=True), reverse=True):
            if param.shape[axis] > 1:
                first[axis], rest = divmod(rest, int(stride))
    if not is_view or rest or any(map(gt, map(add, first, data.shape), param.shape)):
        raise _other_data(name, param)
    return PlacedPart(
        entry.key,
        tuple(first),
        tuple(data.shape),
        tuple(map(int, entry.global_shape)),
        tuple(map(int, entry.global_offset)),
        entry.replica_id,
        bool(getattr(entry, "allow_shape_mismatch", False)),
    )


def _other_data(name: str, param: torch.Tensor) -> ArgumentError:
    return ArgumentError(
        f"entries: that of {name} must have the parameter of shape {list(param.shape)} itself, or views of it, as its "
        "data: make them from state_dict(keep_vars=True)"
    )


def without_last(replica_id: ReplicaId) -> ReplicaId:
    """Number of a copy among ranks that each have other parts: those that differ in the last number, which is 0 then.

    >>> without_last((0, 3, 2)), without_last(5)
    ((0, 3, 0), 0)
    """
    return 0 if isinstance(replica_id, int) else (*replica_id[:-1], 0)
