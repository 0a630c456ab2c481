"""State of a `DataParallelOptimizer` in a checkpoint: boxes of tensors with the shapes of their parameters.

Each rank has a range of the elements of some parameters, which begins and ends anywhere in them. It is cut into boxes
of a tensor with the shape of the parameter, so that any other layout, and any other program, can read it. All else is
in the common state, in the format of `DataParallelOptimizer.split_state_dict`.
"""

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any, TypeGuard

import torch

from trackbed.checkpoint import ShardedTensorFactory
from trackbed.checkpoint.folder import CheckpointFolder
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.errors import CheckpointError
from trackbed.grads.parameter_set import name_in_module
from trackbed.optim.in_checkpoints.placed_parts import (
    NO_PLACES,
    Places,
    as_vector,
    entries_of_range,
    parts_of_parameter,
    without_last,
)
from trackbed.optim.in_checkpoints.placed_state import under_keys, with_params
from trackbed.optim.in_checkpoints.stored_state import (
    KeyOrder,
    find_state,
    optimizer_key,
    options_of_groups,
    stored_key,
    without_names,
)
from trackbed.optim.optimizer import DataParallelOptimizer


def state_of_own(
    optimizer: DataParallelOptimizer, rank: int, prefix: str, order: KeyOrder, places: Places = NO_PLACES
) -> dict[str, Any]:
    """Collective over the ranks: state of a `DataParallelOptimizer`, with entries for this rank's parts.

    Args:
        optimizer: the optimizer.
        rank: number of this rank.
        prefix: text before the keys.
        order: order of the keys.
        places: places of the parameters in stored tensors, if these are not their own.
    """
    common, parts = optimizer.split_state_dict()
    is_sharded = optimizer.model.engine.config.use_distributed_optimizer
    params = named_parameters(optimizer)
    if places:
        common = under_keys(common, places)
        parts = with_params(parts, optimizer)
    for part in parts:
        shape = tuple(params[part.name].shape)
        entries = entries_of_range(
            parts_of_parameter(part.name, shape, places, rank),
            partial(optimizer_key, field=part.key, prefix=prefix, order=order),
            part.value.reshape(-1),
            shape,
            part.span or (0, 0),
            without_last if is_sharded else lambda own: own,
        )
        if entries:
            common["state"].setdefault(part.name, {})[part.key] = entries
    return common


def named_parameters(optimizer: DataParallelOptimizer) -> dict[str, torch.nn.Parameter]:
    """Parameters of an optimizer's model, by their names in the module."""
    return {name_in_module(name): param for name, param in optimizer.model.module.named_parameters()}


def stored_state_of_own(
    optimizer: DataParallelOptimizer, opened: CheckpointFolder, common: Mapping[str, Any], prefix: str, rank: int
) -> Mapping[str, Any]:
    """State of a `DataParallelOptimizer` without its tensors, in a checkpoint of one, or of torch's optimizers.

    Args:
        optimizer: the optimizer.
        opened: opened checkpoint.
        common: its plain values.
        prefix: text before the keys.
        rank: number of this rank.
    """
    saved = common.get(f"{prefix}optimizer")
    if has_parts(saved):
        return saved
    if isinstance(saved, Mapping) and "divided" in saved:
        raise CheckpointError(
            f"state of the optimizer: must have a dictionary under 'divided', found {saved['divided']!r}"
        )
    stored = find_state(opened, common, prefix, rank)
    params = named_parameters(optimizer)
    divided: dict[str, dict[str, str]] = {}
    states = {name: dict(state) for name, state in stored.plain.items() if name in params}
    with BoxReader(opened.path, opened.catalogue) as reader:
        reader.expect(key for name in params for key in stored.objects.get(name, {}).values())
        for name in params:
            for field, key in stored.objects.get(name, {}).items():
                states.setdefault(name, {})[field] = reader.read_object(key)
            for field, key in stored.keys.get(name, {}).items():
                tensor = opened.catalogue.tensors[key]
                if tensor.shape == tuple(params[name].shape) and field != "step":
                    divided.setdefault(name, {})[field] = str(tensor.dtype).removeprefix("torch.")
                    continue
                states.setdefault(name, {})[field] = reader.read_tensor(key)
    groups = [
        {**without_names(own), **options_of_groups(names, stored), "params": names}
        for own, names in zip(optimizer.param_groups, optimizer.group_names, strict=True)
    ]
    return {"state": states, "param_groups": groups, "divided": divided}


def has_parts(state: Any) -> TypeGuard[Mapping[str, Any]]:
    """True for the state of an optimizer whose tensors `sharded_state` has saved apart."""
    return isinstance(state, Mapping) and isinstance(state.get("divided"), Mapping)


def wanted_parts(
    saved: Mapping[str, Any],
    optimizer: DataParallelOptimizer,
    stored: Mapping[str, str],
    opened: CheckpointFolder,
    prefix: str,
) -> dict[str, dict[str, ShardedTensorFactory]]:
    """Entries of the tensors that this rank needs: ranges of updated tensors, and frozen tensors as a whole."""
    params = named_parameters(optimizer)
    trained, spans = set(optimizer.model.engine.params), optimizer.spans()
    entries: dict[str, dict[str, ShardedTensorFactory]] = {}
    for saved_name, types in saved["divided"].items():
        name = name_in_module(saved_name)
        if name not in params or (params[name] in trained and name not in spans):
            continue
        if not isinstance(types, Mapping):
            raise CheckpointError(
                f"state of the optimizer: must have a dictionary for {name} under 'divided', found {types!r}"
            )
        shape, span = tuple(params[name].shape), spans.get(name, (0, params[name].numel()))
        for field, dtype in types.items():
            key = stored_key(name, field, prefix, stored)
            tensor = opened.catalogue.tensors.get(stored.get(key, key))
            # Before tensors of the optimizer had the shape of their parameter, they had one dimension.
            is_flat = tensor is not None and tensor.shape == (prod(shape),)
            flat = torch.empty(span[1] - span[0], dtype=_type_of(dtype), device="cpu")
            stored_shape = (prod(shape),) if is_flat else shape
            parts = entries_of_range(parts_of_parameter(key, stored_shape, NO_PLACES), str, flat, stored_shape, span)
            entries.setdefault(name, {})[field] = as_vector(key, parts, flat)
    return entries


def _type_of(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"state of the optimizer: must name types of torch under 'divided', found {name!r}")
    return found
