"""State of a model under the keys of its `sharded_state_dict()`."""

from collections.abc import Mapping
from typing import Any

import torch

from trackbed.checkpoint import ShardedObject, ShardedTensor
from trackbed.errors import ArgumentError
from trackbed.grads.parameter_set import name_in_module
from trackbed.optim.in_checkpoints.placed_parts import Places


def tensors_with_entries(module: torch.nn.Module, entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a module for which there are entries, by name, and all parameters by their first names."""
    tensors, seen = dict[str, torch.Tensor](), set[torch.Tensor]()
    for key, value in module.state_dict(keep_vars=True).items():
        name = name_in_module(key)
        is_first = isinstance(value, torch.nn.Parameter) and value not in seen
        if isinstance(value, torch.Tensor) and (name in entries or is_first):
            tensors[name] = value
            seen.add(value)
    return tensors


def entries_of_model(
    module: torch.nn.Module, entries: Mapping[str, Any], places: Places, prefix: str
) -> dict[str, list[ShardedTensor] | ShardedObject]:
    """Entries for the tensors and objects of a module, by name; tensors are parts of its own.

    Args:
        module: the module.
        entries: entries by name, of Trackbed or of Megatron Core.
        places: places of the tensors.
        prefix: text before the keys.

    Raises:
        ArgumentError: an entry is neither that of a tensor of the module nor that of an object.
    """
    tensors, found = tensors_with_entries(module, entries), dict[str, list[ShardedTensor] | ShardedObject]()
    for name, parts in places.items():
        tensor = tensors[name].detach()
        found[name] = [
            part.entry(f"{prefix}{part.key}", tensor[part.index()], part.first, part.replica_id) for part in parts
        ]
    for name, entry in entries.items():
        if name in places:
            continue
        if not hasattr(entry, "global_shape") or isinstance(getattr(entry, "data", None), torch.Tensor):
            raise ArgumentError(
                f"entries: must be those of the module's tensors and objects, but {name} is none of them, and has a "
                f"{type(entry).__name__}"
            )
        place = tuple(entry.global_shape), tuple(entry.global_offset)
        found[name] = ShardedObject(f"{prefix}{entry.key}", entry.data, *place, entry.replica_id)
    return found


def with_tensors(module: torch.nn.Module, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """State of a module by name, whose tensors were filled in place, with the objects that were loaded."""
    own = {name_in_module(name): value for name, value in module.state_dict().items()}
    return {**own, **{name: value for name, value in loaded.items() if not isinstance(value, list)}}
