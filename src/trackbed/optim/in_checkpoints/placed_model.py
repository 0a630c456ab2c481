"""State of a model under the keys of its `sharded_state_dict()`."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from trackbed.checkpoint import ShardedObject, ShardedTensor
from trackbed.checkpoint.state.sharded_tensor import is_main_replica
from trackbed.errors import ArgumentError
from trackbed.grads.parameter_set import name_in_module
from trackbed.optim.in_checkpoints.placed_parts import Places, is_tensor

logger = logging.getLogger(__name__)


def tensors_with_entries(module: torch.nn.Module, entries: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a module that entries describe, by name: all but those in objects, and further names of tied ones."""
    tensors, seen = dict[str, torch.Tensor](), set[torch.Tensor]()
    for key, value in module.state_dict(keep_vars=True).items():
        name = name_in_module(key)
        is_extra = name.rpartition(".")[2] == "_extra_state"
        if is_extra and name not in entries and value is not None:
            logger.warning("entries: have none for %s, which is not saved", name)
        if not isinstance(value, torch.Tensor) or is_extra or (value in seen and name not in entries):
            continue
        tensors[name] = value
        seen.add(value)
    return tensors


def entries_of_model(
    module: torch.nn.Module, entries: Mapping[str, Any], places: Places, prefix: str, *, saves: bool
) -> dict[str, list[ShardedTensor] | ShardedObject]:
    """Entries for the tensors and objects of a module, by name; tensors are parts of its own.

    Args:
        module: the module.
        entries: entries by name, of Trackbed or of Megatron Core.
        places: places of the tensors.
        prefix: text before the keys.
        saves: True to leave out copies of buffers, which may differ between ranks, so that none is a mixture.

    Raises:
        ArgumentError: an entry is neither that of a tensor of the module nor that of an object.
    """
    tensors, found = tensors_with_entries(module, entries), dict[str, list[ShardedTensor] | ShardedObject]()
    names = {name_in_module(key) for key in module.state_dict()}
    for name, parts in places.items():
        tensor = tensors[name].detach()
        is_whole = not saves or isinstance(tensors[name], torch.nn.Parameter)
        found[name] = [
            part.entry(f"{prefix}{part.key}", tensor[part.index()], part.first, part.replica_id)
            for part in parts
            if is_whole or is_main_replica(part.replica_id)
        ]
    for name, entry in entries.items():
        if name in places:
            continue
        if name not in names or is_tensor(entry) or not hasattr(entry, "global_shape"):
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
