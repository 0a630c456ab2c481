"""State of a `DataParallelOptimizer` under the keys of a model's `sharded_state_dict()`, as Megatron Core has it.

Tensors are those of its format `fully_reshardable`: `optimizer.state.exp_avg.KEY`, and `optimizer.state.param.KEY` for
parameters in float32. All else is by key, in the place of the name: ranks of a pipeline have other names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from trackbed.checkpoint import ShardedTensorFactory
from trackbed.checkpoint.folder import CheckpointFolder
from trackbed.checkpoint.load import check_parts
from trackbed.checkpoint.ranks import Meeting
from trackbed.errors import CheckpointError
from trackbed.grads.parameter_set import name_in_module
from trackbed.optim.in_checkpoints.placed_parts import Places, as_vector, entries_of_range
from trackbed.optim.in_checkpoints.stored_state import MEGATRONS_MAIN, optimizer_key, without_names
from trackbed.optim.optimizer import DataParallelOptimizer
from trackbed.optim.pieces import is_low_precision
from trackbed.optim.state_parts import MAIN, State, StatePart

_FORMAT: Final = "fully_reshardable"
_WHERE: Final = "state of the optimizer"


def under_keys(common: Mapping[str, Any], places: Places) -> dict[str, Any]:
    """State without divided tensors by the keys of parameters, where it has their names.

    Args:
        common: result of `DataParallelOptimizer.split_state_dict`.
        places: places of the parameters.

    Raises:
        CheckpointError: an optimizer has a tensor that is neither divided nor a single number, so that parts of one
            stored tensor may have different ones.
    """
    states: dict[str, State] = {}
    for name, values in common["state"].items():
        for field, value in values.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                raise CheckpointError(
                    f"{_WHERE}: must have tensors of the shape of {name} or single numbers to be stored under the keys "
                    f"of entries, but {field!r} has the shape {list(value.shape)}"
                )
        for key in keys_of([name], places):
            _require_same(states.setdefault(key, dict(values)), values, name, key)
    types: dict[str, dict[str, str]] = {}
    for name, fields in common["divided"].items():
        for field in fields:
            if field == MEGATRONS_MAIN or "." in field:
                raise CheckpointError(
                    f"{_WHERE}: its keys must have no dot and not be {MEGATRONS_MAIN!r} to be stored under the keys of "
                    f"entries, but that of {name} has {field!r}"
                )
        for key in keys_of([name], places):
            types.setdefault(key, dict(fields))
    groups = [{**group, "params": keys_of(group["params"], places)} for group in common["param_groups"]]
    seen: dict[str, State] = {}
    for group in groups:
        for key in group["params"]:
            _require_same(seen.setdefault(key, without_names(group)), without_names(group), "one of its layers", key)
    return {**common, "state": states, "divided": types, "param_groups": groups}


def _require_same(one: State, other: State, name: str, key: str) -> None:
    """Checks that parameters that are stored in one tensor have the same single numbers and options."""
    for field in sorted({*one, *other}):
        if not _is_same(one.get(field), other.get(field)):
            raise CheckpointError(
                f"{_WHERE}: all parameters that are stored as {key} must have the same {field!r}, but {name} has "
                f"{other.get(field)!r}, and another one {one.get(field)!r}"
            )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool(one == other)


def keys_of(names: Sequence[str], places: Places) -> list[str]:
    """Keys of the stored tensors of parameters, each once, in order."""
    return list(dict.fromkeys(part.key for name in names for part in places[name]))


def with_params(parts: Sequence[StatePart], optimizer: DataParallelOptimizer) -> list[StatePart]:
    """Parts of a state as Megatron Core has them: with parameters in float32, also where these are the model's own."""
    own = [
        StatePart(part.name, MEGATRONS_MAIN if part.key == MAIN else part.key, part.value, part.span) for part in parts
    ]
    copied = {part.name for part in parts if part.key == MAIN}
    named = ((name_in_module(name), param) for name, param in optimizer.model.module.named_parameters())
    params = {name: param for name, param in named if name not in copied}
    return own + [
        StatePart(name, MEGATRONS_MAIN, params[name].detach().reshape(-1)[slice(*span)], span)
        for name, span in optimizer.spans().items()
        if name in params
    ]


@dataclass(frozen=True, slots=True)
class PlacedState:
    """Stored state of the parameters of an optimizer, by their names."""

    plain: dict[str, Any]
    """All but the divided tensors, in the format of `DataParallelOptimizer.split_state_dict`."""
    is_megatrons: bool
    """True if Megatron Core has written it."""


def find_placed_state(
    optimizer: DataParallelOptimizer,
    params: Mapping[str, torch.Tensor],
    opened: CheckpointFolder,
    common: Mapping[str, Any],
    prefix: str,
    places: Places,
) -> PlacedState:
    """Finds the state of an optimizer, of Trackbed or in Megatron Core's format `fully_reshardable`.

    Args:
        optimizer: the optimizer.
        params: parameters of its model by name.
        opened: opened checkpoint.
        common: its plain values.
        prefix: text before the keys.
        places: places of the parameters.

    Raises:
        CheckpointError: there is none for a parameter, or its format is another one.
    """
    saved: Any = common.get(f"{prefix}optimizer")
    is_own = isinstance(saved, Mapping) and isinstance(saved.get("divided"), Mapping)
    if not is_own and not (isinstance(saved, Mapping) and saved.get("param_state_sharding_type") == _FORMAT):
        raise CheckpointError(
            f"{opened.path}: must have the state of an optimizer that sharded_state(entries=...) saved, or that of "
            f"Megatron Core's in the format {_FORMAT!r}, but has none"
        )
    owner = saved if is_own else saved.get("optimizer")
    groups = owner.get("param_groups") if isinstance(owner, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError(f"{opened.path}: {_WHERE}: must have a list of dictionaries under 'param_groups'")
    if len(groups) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{_WHERE}: must have as many parameter groups as the optimizer, {len(optimizer.param_groups)}, but has "
            f"{len(groups)}"
        )
    types = _types_of(opened, prefix)
    if is_own:
        _check_stored(saved["divided"], types, opened)
    found: dict[str, Any] = {"state": {}, "param_groups": [], "divided": {}}
    if is_own:
        found = {**saved, **found}
    for own, names, by_place in zip(optimizer.param_groups, optimizer.group_names, groups, strict=True):
        keys = set(keys_of(names, places))
        stored = next((group for group in groups if is_own and not keys.isdisjoint(group.get("params", ()))), by_place)
        options = without_names(own)
        known = stored if is_own else {key: stored[key] for key in options if key in stored}
        found["param_groups"].append({**options, **without_names(known), "params": names})
        numbers = {"step": torch.tensor(float(stored["step"]))} if not is_own and "step" in stored else {}
        for name in names:
            key = places[name][0].key
            if is_own:
                numbers = _numbers_of(key, stored, saved.get("state", {}))
            fields = {field: of for field, of in types.get(key, {}).items() if field != MEGATRONS_MAIN}
            if is_low_precision(params[name]) and MEGATRONS_MAIN in types.get(key, {}):
                fields[MAIN] = types[key][MEGATRONS_MAIN]
            if fields:
                found["state"][name], found["divided"][name] = dict(numbers), fields
    return PlacedState(found, not is_own)


def _numbers_of(key: str, group: Mapping[str, Any], states: Mapping[str, State]) -> State:
    """Single numbers of the state of a stored tensor: of one of its group, if it is one of another pipeline stage."""
    known = states.get(key)
    return known if known is not None else next((states[one] for one in group.get("params", ()) if one in states), {})


def _check_stored(listed: Mapping[str, Any], types: Mapping[str, Mapping[str, str]], opened: CheckpointFolder) -> None:
    """Checks that all tensors are stored that the plain values list."""
    for key, fields in listed.items():
        for field in fields:
            stored = MEGATRONS_MAIN if field == MAIN else field
            if stored not in types.get(key, {}):
                raise CheckpointError(f"{opened.path}: {_WHERE}: must have {stored!r} of {key}, but has none")


def _types_of(opened: CheckpointFolder, prefix: str) -> dict[str, dict[str, str]]:
    """Types of the stored tensors of an optimizer, by the key of the parameter and the field."""
    start, found = f"{prefix}optimizer.state.", dict[str, dict[str, str]]()
    for key, tensor in opened.catalogue.tensors.items():
        if key.startswith(start):
            field, _, name = key[len(start) :].partition(".")
            found.setdefault(name, {})[field] = str(tensor.dtype).removeprefix("torch.")
    return found


def wanted_placed_parts(
    state: PlacedState,
    optimizer: DataParallelOptimizer,
    params: Mapping[str, torch.Tensor],
    prefix: str,
    places: Places,
) -> dict[str, dict[str, ShardedTensorFactory]]:
    """Entries of the tensors that this rank needs."""
    found: dict[str, dict[str, ShardedTensorFactory]] = {}
    for name, span in optimizer.spans().items():
        for field, dtype in state.plain["divided"].get(name, {}).items():
            stored = MEGATRONS_MAIN if field == MAIN else field
            key_of = partial(optimizer_key, field=stored, prefix=prefix, order="megatron")
            found.setdefault(name, {})[field] = _range_of(name, key_of, getattr(torch, dtype), params, span, places)
    return found


def _range_of(
    name: str,
    key_of: Callable[[str], str],
    dtype: torch.dtype,
    params: Mapping[str, torch.Tensor],
    span: tuple[int, int],
    places: Places,
) -> ShardedTensorFactory:
    """Entry of a range of elements, which is loaded as one vector."""
    flat = torch.empty(span[1] - span[0], dtype=dtype, device="cpu")
    parts = entries_of_range(places[name], key_of, flat, tuple(params[name].shape), span)
    return as_vector(key_of(name), parts, flat)


def refuse_shifted(
    state: PlacedState,
    optimizer: DataParallelOptimizer,
    params: Mapping[str, torch.Tensor],
    opened: CheckpointFolder,
    meeting: Meeting,
    prefix: str,
    places: Places,
) -> None:
    """Collective over the ranks: refuses states of Megatron Core whose tensors lie at other elements than they say.

    Up to 0.19.0 it leaves out the padding between the buckets of a buffer when it writes, but not when it counts, so
    that what follows the first bucket is shifted. Its parameters in float32, rounded, are then not the model's.

    Raises:
        CheckpointError: they are not.
    """
    if not state.is_megatrons:
        return
    wanted: dict[str, dict[str, ShardedTensorFactory]] = {}
    for name, span in optimizer.spans().items():
        stored = opened.catalogue.tensors.get(f"{prefix}{places[name][0].key}")
        if stored is not None:
            main_key = partial(optimizer_key, field=MEGATRONS_MAIN, prefix=prefix, order="megatron")
            wanted[name] = {
                "main": _range_of(name, main_key, torch.float32, params, span, places),
                "own": _range_of(name, lambda key: f"{prefix}{key}", stored.dtype, params, span, places),
            }
    request = check_parts({"parts": wanted}, opened, rename=None, allow_cast=False)
    for name, both in request.read({}, meeting).get("parts", {}).items():
        rounded, own = both["main"].to(both["own"].dtype), both["own"]
        if not bool(((rounded == own) | (rounded.isnan() & own.isnan())).all()):
            raise CheckpointError(
                f"{opened.path}: {_WHERE}: parameters in float32, rounded, must be those of the model, but those of "
                f"{name} are not: megatron-core up to 0.19.0 writes tensors that are shifted where a buffer has "
                "several buckets; load the model alone"
            )
