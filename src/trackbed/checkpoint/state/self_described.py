"""Entries for tensors that say themselves which boxes of a larger tensor they have.

They have the methods that `torch.distributed.checkpoint` calls: `__create_write_items__`, `__create_chunk_list__` and
`__get_tensor_shard__`, themselves or, of a `DTensor`, its local part. `LocalShardsWrapper` is one, which has several
boxes, and tensors of quantised types are others.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch

from trackbed.checkpoint.state.divided_tensors import PartOfDivided, is_divided
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, ShardedTensorFactory
from trackbed.errors import CheckpointError

_METHODS: Final = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")


@dataclass
class DescribedBox(ShardedTensor):
    """Box of such a tensor that is saved. Where several ranks have one, they have the same values."""


def describes_itself(value: Any) -> bool:
    """True for a tensor that says which boxes it has. Of `DTensor`s, those whose local part does."""
    owner = value._local_tensor if is_divided(value) else value
    return isinstance(owner, torch.Tensor) and all(hasattr(type(owner), name) for name in _METHODS)


def boxes_to_save(value: Any, key: str) -> dict[int, DescribedBox]:
    """Entries for the boxes of a tensor that is saved.

    Args:
        value: the tensor.
        key: its key.

    Raises:
        CheckpointError: it describes something else than boxes.
    """
    items = value.__create_write_items__(key, value)
    if not all(item.tensor_data is not None for item in items):
        raise CheckpointError(f"{key}: a {_class_of(value)} must describe boxes of a tensor, but describes an object")
    entries = {}
    for number, item in enumerate(items):
        chunk = item.tensor_data.chunk
        data = _data_of(value, item.index, key)
        entries[number] = DescribedBox(
            item.index.fqn,
            data,
            data.dtype,
            tuple(chunk.sizes),
            tuple(item.tensor_data.size),
            tuple(chunk.offsets),
            None,
        )
    return entries


def boxes_to_load(value: Any, key: str) -> ShardedTensorFactory:
    """Entry for the boxes of a tensor that is filled, which gives the tensor back.

    Args:
        value: the tensor.
        key: its key.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shape = tuple(value.size())
    entries = {}
    for number, chunk in enumerate(value.__create_chunk_list__()):
        data = _data_of(value, MetadataIndex(key, chunk.offsets, number), key)
        place = tuple(chunk.offsets)
        entries[number] = PartOfDivided(key, data, data.dtype, tuple(chunk.sizes), shape, place, None, has_copies=True)
    if not entries:
        nothing = torch.empty(0, device="cpu")
        entries[0] = PartOfDivided(key, nothing, nothing.dtype, (0,), (0,), (0,), None, is_elsewhere=True)
    return ShardedTensorFactory(key, None, lambda *_: entries, lambda _: value)


def _data_of(value: Any, index: Any, key: str) -> torch.Tensor:
    data = value.__get_tensor_shard__(index)
    if type(data) is not torch.Tensor and not isinstance(data, torch.nn.Parameter):
        raise CheckpointError(
            f"{key}: the boxes of a {_class_of(value)} must be plain tensors, found {_class_of(data)}"
        )
    found: torch.Tensor = data.detach()
    return found


def _class_of(value: Any) -> str:
    return type(value._local_tensor if is_divided(value) else value).__name__
