"""Tensors that have one memory under several keys, such as tied weights: they are written once."""

from collections.abc import Sequence
from typing import Any

import torch

from trackbed.checkpoint.state.divided_tensors import DividedTensor
from trackbed.checkpoint.state.sharded_object import ShardedObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor


def note_aliases(entries: Sequence[DividedTensor]) -> None:
    """Sets `alias_of` of entries that have the memory, and the place on the mesh, of an earlier one."""
    first: dict[Any, str] = {}
    for entry in entries:
        known = (memory_of(entry.data), entry.shape, entry.division)
        key = first.setdefault(known, entry.key)
        entry.alias_of = "" if key == entry.key else key


def aliases_of(shards: Sequence[ShardedTensor | ShardedObject]) -> dict[str, str]:
    """Keys of tensors whose shards are those of an earlier tensor, in the same memory, and the key of that one."""
    of_key: dict[str, list[Any] | None] = {}
    for shard in shards:
        if isinstance(shard, ShardedObject) or shard.data is None or shard.data.layout is not torch.strided:
            of_key[shard.key] = None
            continue
        place = (memory_of(shard.data), tuple(shard.global_shape), tuple(shard.global_offset), shard.prepend_axis_num)
        found = of_key.setdefault(shard.key, [])
        if found is not None:
            found.append(place)
    first: dict[Any, str] = {}
    aliases = {}
    for key, places in of_key.items():
        if places is not None and (other := first.setdefault(tuple(places), key)) != key:
            aliases[key] = other
    return aliases


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The memory of a dense tensor, its layout there, and its type: the same for two names of one tensor."""
    # The storage itself, not its address, which is 0 for all that have no elements.
    storage = tensor.untyped_storage()._cdata
    bits = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), bits
