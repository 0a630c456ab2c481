"""Entries for the state of an optimizer, made from the entries of its parameters. Names are Megatron Core 0.16.1's."""

import logging
from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any, Final

import torch

from trackbed.checkpoint.state.sharded_object import LocalNonpersistentObject
from trackbed.checkpoint.state.sharded_tensor import ShardedTensor, ShardedTensorFactory
from trackbed.checkpoint.state.tree import Tree, nested_values
from trackbed.errors import CheckpointError
from trackbed.megatron.checkpoints.entries import extract_sharded_tensors_and_factories

logger = logging.getLogger(__name__)

KEEP_VARS_HINT: Final = (
    " The state dictionary must have the parameters themselves, not copies: call state_dict(keep_vars=True), and use a "
    "ShardedTensorFactory for a parameter that is transformed."
)

Entry = ShardedTensor | ShardedTensorFactory


def get_optim_param_to_id_map(optim_params_iter: Iterable[torch.nn.Parameter]) -> dict[int, int]:
    """Returns the place of each parameter of an optimizer, the first one, by its `id`."""
    places: dict[int, int] = {}
    for place, param in enumerate(optim_params_iter):
        places.setdefault(id(_local(param)), place)
    return places


def get_param_id_to_sharded_param_map(
    model_sharded_state_dict: Tree, optim_params_iter: Iterable[torch.nn.Parameter]
) -> dict[int, Entry]:
    """Returns the entry of each parameter of an optimizer, by its place.

    Args:
        model_sharded_state_dict: state dictionary of the model, whose entries have the parameters themselves.
        optim_params_iter: parameters in the order of the optimizer.
    """
    entries, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    places = get_optim_param_to_id_map(optim_params_iter)
    found = {places[id(entry.data)]: entry for entry in nested_values(entries) if id(entry.data) in places}
    if not found:
        logger.warning("no tensor of the model's state is a parameter of the optimizer.%s", KEEP_VARS_HINT)
    return found


def make_sharded_optimizer_tensor(model_param: Entry, optim_param: torch.Tensor, prefix: str) -> Entry:
    """Describes a tensor of an optimizer as the parameter is, with a prefix before its key."""
    data, key = _local(optim_param), f"{prefix}.{model_param.key}"
    if isinstance(model_param, ShardedTensorFactory):
        return replace(model_param, key=key, data=data)
    if tuple(data.shape) != tuple(model_param.local_shape):
        wanted = tuple(model_param.local_shape)
        raise CheckpointError(f"{key}: must have the shape of its parameter, {wanted}, but has {tuple(data.shape)}")
    return replace(model_param, key=key, data=data, dtype=data.dtype)


def optim_state_to_sharding_state(
    optim_state_dict: dict[str, Any],
    id_to_sharded_param_map: dict[int, Entry],
    exclude_keys: Collection[str] = (),
) -> None:
    """Replaces the tensors in the state of an optimizer by entries, in place.

    Keys are `optimizer.state.<name>.<key of the parameter>`; the parameters of each group stay local.

    Args:
        optim_state_dict: state of an optimizer.
        id_to_sharded_param_map: entry of each parameter by its place.
        exclude_keys: names that are left out.
    """
    sharded: dict[int, dict[str, Entry]] = {}
    for place, state in optim_state_dict["state"].items():
        kept = {name: value for name, value in state.items() if name not in exclude_keys}
        if kept and place not in id_to_sharded_param_map:
            raise ValueError(f"optimizer: parameter {place} must be one of the model's state, but is not")
        sharded[place] = {
            name: make_sharded_optimizer_tensor(id_to_sharded_param_map[place], value, f"optimizer.state.{name}")
            for name, value in kept.items()
        }
    groups = deepcopy(optim_state_dict["param_groups"])
    for group in groups:
        group["params"] = LocalNonpersistentObject(group["params"])
    optim_state_dict.update(param_groups=groups, state=sharded)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; another tensor as it is."""
    local: torch.Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return local
