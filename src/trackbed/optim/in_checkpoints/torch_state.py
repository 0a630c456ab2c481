"""States of torch's optimizers by the names of parameters, divided among the ranks as the parameters are.

Tensors have the keys of `torch.distributed.checkpoint.state_dict`: `optimizer.state.NAME.KEY`. Of a parameter that is a
`DTensor`, a tensor with the shape of this rank's part is stored as a `DTensor` too; one without dimensions, or with the
shape of the parameter, is whole on every rank; any other belongs to its rank, and is loaded on as many ranks only.
"""

import copy
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import torch
from torch.optim import Optimizer

from trackbed.checkpoint import ShardedObject, ShardedTensor, ShardedTensorFactory
from trackbed.checkpoint.folder import CheckpointFolder
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.ranks import Meeting
from trackbed.checkpoint.state.divided_tensors import divided_tensor, is_divided, parts_to_load
from trackbed.checkpoint.state.partial_tensors import tensors_in
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.optim.in_checkpoints.stored_state import (
    StoredState,
    differing_options,
    options_of_groups,
    without_names,
)
from trackbed.optim.state_parts import State
from trackbed.optim.torch_optimizers import place_steps
from trackbed.plural import number_of

logger = logging.getLogger(__name__)

Options: TypeAlias = Literal["checkpoint", "program"]
"""Source of the options that parameter groups have after a load."""
OPTIONS: Final = get_args(Options)
_OF_PROGRAM: Final = ("foreach", "fused", "capturable", "differentiable")
"""Options that say how the program computes, and are never those of a checkpoint."""
_OWN_SHAPES: Final = ("row_var", "col_var", "d", "prev_flat_grad")
"""Tensors of torch's `Adafactor` and `LBFGS` that have other shapes than a parameter."""
_PART, _WHOLE = "part", "whole"


def check_optimizers(optimizers: Sequence[Any], names: Mapping[torch.Tensor, str]) -> None:
    """Checks that optimizers are torch's, and that their parameters are those of a model.

    Args:
        optimizers: optimizers.
        names: names of the parameters of the model.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"optimizer must be a DataParallelOptimizer, or one of torch or a list of these, but is of "
                f"{type(optimizer).__name__}"
            )
    seen = set[torch.Tensor]()
    for number, param in enumerate(_params_of(optimizers)):
        if param not in names:
            raise ArgumentError(
                f"optimizer must have parameters of the model alone, but number {number}, of shape "
                f"{tuple(param.shape)}, is none of them"
            )
        if param in seen:
            raise ArgumentError(f"optimizer must have each parameter once, but has {names[param]} twice")
        seen.add(param)


def _params_of(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def state_of(
    optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str], meeting: Meeting, prefix: str
) -> State:
    """Collective over the ranks: returns the states of optimizers, by the names of parameters.

    Nothing is changed: an optimizer that has not stepped has no state.

    Args:
        optimizers: optimizers of torch.
        names: names of the parameters.
        meeting: the ranks.
        prefix: text before the keys.
    """
    states: dict[str, tuple[Any, State]] = {}
    groups: list[State] = []
    others: State = {}
    for number, optimizer in enumerate(optimizers):
        saved = optimizer.state_dict()  # which hooks and subclasses may have changed
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        param_of = dict(zip(numbers, _params_of([optimizer]), strict=True))
        states |= {
            names[param_of[key]]: (param_of[key], dict(state))
            for key, state in saved["state"].items()
            if key in param_of and state
        }
        groups += [
            {**copy.deepcopy(without_names(group)), "params": [names[param_of[number]] for number in group["params"]]}
            for group in saved["param_groups"]
        ]
        rest = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
        if rest:
            others[str(number)] = copy.deepcopy(rest)
    _check_fields(states)
    local, whole = _place_plain_tensors(states, meeting, prefix)
    more = {"others": others, "local": local, "whole": whole}
    found = {name: state for name, (_, state) in states.items()}
    return {"state": found, "param_groups": groups, **{key: value for key, value in more.items() if value}}


def _check_fields(states: Mapping[str, tuple[Any, State]]) -> None:
    """Checks the keys of states, which are parts of stored keys."""
    for name, (_, state) in states.items():
        for field in state:
            if not isinstance(field, str) or "." in field or "/" in field:
                raise ArgumentError(
                    f"optimizer: the keys of its states must be texts without '.' and '/', but that of {name} has "
                    f"{field!r}"
                )


def _place_plain_tensors(
    states: Mapping[str, tuple[Any, State]], meeting: Meeting, prefix: str
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Collective over the ranks: replaces plain tensors of `DTensor`s' states by what is saved of them; see the module.

    Returns:
        Fields that are each rank's part, and fields that are whole on every rank, by parameter name.
    """
    own = [
        (name, field, _kind_of(value, param))
        for name, (param, state) in states.items()
        for field, value in state.items()
        if is_divided(param) and torch.is_tensor(value) and not is_divided(value) and value.dim() > 0
    ]
    # A tensor may have the shape of a part on one rank by chance.
    kinds: dict[tuple[str, str], set[str]] = {}
    for of_rank in meeting.group.all_gather(own):
        for name, field, kind in of_rank:
            kinds.setdefault((name, field), set()).add(kind)
    local: dict[str, list[str]] = {}
    whole: dict[str, list[str]] = {}

    for name, field, _ in own:
        param, state = states[name]
        if kinds[name, field] == {_PART}:
            state[field] = _divided_like(param, state[field])
            local.setdefault(name, []).append(field)
        elif kinds[name, field] == {_WHOLE}:
            whole.setdefault(name, []).append(field)
        else:
            state[field] = _of_rank(f"{prefix}optimizer.state.{name}.{field}", state[field], meeting)
    if any(is_divided(param) for param, _ in states.values()):
        # `save` stores tensors in dictionaries under keys of their own, beside DTensors.
        for name, (_, state) in states.items():
            for field, value in state.items():
                is_entry = torch.is_tensor(value) or isinstance(value, ShardedObject)
                found = [] if is_entry else [one for _, one in tensors_in(value)]
                if any(map(is_divided, found)):
                    raise ArgumentError(
                        f"optimizer: the DTensors in the state of {name} must lie directly in it, but {field!r} has "
                        "some further down"
                    )
                if found:
                    state[field] = _of_rank(f"{prefix}optimizer.state.{name}.{field}", value, meeting)
    return local, whole


def _of_rank(key: str, value: Any, meeting: Meeting) -> ShardedObject:
    """Entry of a value that belongs to this rank."""
    return ShardedObject(key, value, (meeting.size,), (meeting.rank,))


def _kind_of(value: torch.Tensor, param: Any) -> str:
    """Kind of a tensor in the state of a `DTensor`, by its shape: this rank's part, the whole, or another."""
    is_whole = param.device_mesh.size() == 1 or all(placement.is_replicate() for placement in param.placements)
    if value.shape == param._local_tensor.shape and not is_whole:
        return _PART
    return _WHOLE if value.shape == param.shape else "other"


def _divided_like(param: Any, local: torch.Tensor) -> Any:
    """A `DTensor` with the division of another one."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def request_for(
    stored: StoredState, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str], folder: CheckpointFolder
) -> dict[str, State]:
    """Entries for the tensors to load, by parameter name and field.

    Args:
        stored: result of `find_state`.
        optimizers: optimizers of torch.
        names: names of the parameters.
        folder: opened checkpoint.
    """
    wanted: dict[str, State] = {}
    for optimizer in optimizers:
        casts, users = type(optimizer).__module__.startswith("torch.optim."), _users_of_storages(optimizer)
        for param in _params_of([optimizer]):
            name, state = names[param], optimizer.state.get(param, {})
            entries = {}
            for field, key in stored.keys.get(name, {}).items():
                own = state.get(field)
                if not torch.is_tensor(own) or users.get(_storage_of(own)) != 1:
                    own = None  # what shares its memory with another tensor is not filled
                entries[field] = _target(
                    folder,
                    key,
                    param,
                    own,
                    casts=casts and field != "step",
                    may_be_flat=stored.is_own,
                    is_whole=field in stored.whole.get(name, ()),
                )
            if entries:
                wanted[name] = entries
    return wanted


def _users_of_storages(optimizer: Optimizer) -> Counter[int]:
    """Number of tensors in the states of an optimizer that have each storage; expanded ones count twice."""
    users = Counter[int]()
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if torch.is_tensor(value) and value.layout is torch.strided:
                local = _local_of(value)
                pairs = zip(local.stride(), local.shape, strict=True)
                is_expanded = any(stride == 0 and size > 1 for stride, size in pairs)
                users[_storage_of(value)] += 2 if is_expanded else 1
    return users


def _local_of(value: Any) -> Any:
    """This rank's part of a `DTensor`; another tensor as it is."""
    return value._local_tensor if is_divided(value) else value


def _storage_of(value: Any) -> int:
    local = _local_of(value)
    return int(local.untyped_storage()._cdata) if local.layout is torch.strided else -1


def _target(
    folder: CheckpointFolder, key: str, param: Any, own: Any, *, casts: bool, may_be_flat: bool, is_whole: bool
) -> Any:
    """Entry for a tensor of the state of a parameter.

    Args:
        folder: opened checkpoint.
        key: its stored key.
        param: the parameter.
        own: tensor that has its place now, and may be filled; None if there is none.
        casts: True to load it in the type of the parameter.
        may_be_flat: True if it may be stored with one dimension instead of the parameter's.
        is_whole: True if every rank has it whole, also of a `DTensor`.
    """
    tensor = folder.catalogue.tensors.get(key)
    if tensor is None:
        raise CheckpointError(f"{key}: must be a tensor of the checkpoint, but is not there")
    is_flat = may_be_flat and tensor.shape == (param.numel(),) and param.dim() != 1
    if is_flat and is_divided(param):
        raise CheckpointError(
            f"{key}: must have the shape {tuple(param.shape)} of its parameter to be loaded into a DTensor, but has "
            f"{tensor.shape}, as an older Trackbed stored it: load it into a DataParallelOptimizer, and save it again"
        )
    is_like_param = tensor.shape == tuple(param.shape) and len(tensor.shape) > 0
    if (
        casts
        and not (is_like_param or is_flat or may_be_flat)
        and len(tensor.shape) > 0
        and not _has_shapes_of_its_own(key)
    ):
        raise CheckpointError(
            f"{key}: must have the shape {tuple(param.shape)} of its parameter, but has {tensor.shape}: are the "
            "parameters of the optimizer in the order in which they were saved?"
        )
    # torch's own optimizers need the type of the parameter.
    are_floats = tensor.dtype.is_floating_point and param.is_floating_point()
    dtype = param.dtype if casts and (is_like_param or is_flat) and are_floats else tensor.dtype
    if is_like_param and is_divided(param) and not is_whole:
        value = own if _can_be_filled(own, param, dtype) else None
        if value is None:
            value = _divided_like(param, torch.empty_like(param.detach()._local_tensor, dtype=dtype))
        return parts_to_load(divided_tensor(value, key), value, key)
    local = param.detach()._local_tensor if is_divided(param) else param
    data = torch.empty(tensor.shape, dtype=dtype, device=local.device if is_like_param or is_flat else "cpu")
    if is_like_param and not is_divided(param) and _can_be_filled(own, param, dtype):
        data = own
    zeros = (0,) * len(tensor.shape)
    if is_flat:
        whole = data.view(param.shape)
        entry = ShardedTensor(key, data, dtype, tensor.shape, tensor.shape, zeros, None)
        return ShardedTensorFactory(key, data, lambda *_: entry, lambda _: whole)
    return ShardedTensor(key, data, dtype, tensor.shape, tensor.shape, zeros, None)


def _has_shapes_of_its_own(key: str) -> bool:
    """True for tensors of torch's optimizers that have other shapes than their parameters."""
    return key.rpartition(".")[2] in _OWN_SHAPES


def _can_be_filled(own: Any, param: Any, dtype: torch.dtype) -> bool:
    """True for a tensor of a state that lies as its parameter does, and has a type."""
    if not torch.is_tensor(own) or own.dtype != dtype or own.shape != param.shape:
        return False
    if is_divided(own) != is_divided(param) or own.device != param.device:
        return False
    value: Any = own
    return not is_divided(own) or (value.device_mesh, value.placements) == (param.device_mesh, param.placements)


def read_objects(
    stored: StoredState, names: Collection[str], folder: CheckpointFolder, num_ranks: int
) -> dict[str, State]:
    """Reads the values of states that are objects, by parameter name and field.

    Args:
        stored: result of `find_state`.
        names: names of the parameters.
        folder: opened checkpoint.
        num_ranks: number of ranks.

    Raises:
        CheckpointError: an object belongs to a rank, and was saved on another number of ranks.
    """
    with BoxReader(folder.path, folder.catalogue) as reader:
        reader.expect(key for name, fields in stored.objects.items() if name in names for key in fields.values())
        return {
            name: {field: reader.read_object(_require_same_ranks(key, num_ranks)) for field, key in fields.items()}
            for name, fields in stored.objects.items()
            if name in names
        }


def _require_same_ranks(unique_key: str, num_ranks: int) -> str:
    _, is_of_rank, place = unique_key.partition("/shard_")
    saved = place.rpartition("_")[2]
    if is_of_rank and saved != str(num_ranks):
        raise CheckpointError(
            f"{unique_key}: must be loaded on {saved} ranks, as it was saved, since each has a value of its own, but "
            f"there are {num_ranks}"
        )
    return unique_key


def load_state(
    optimizers: Sequence[Optimizer],
    names: Mapping[torch.Tensor, str],
    stored: StoredState,
    values: Mapping[str, State],
    options: Options,
) -> None:
    """Gives optimizers what was loaded.

    Args:
        optimizers: optimizers of torch.
        names: names of the parameters.
        stored: result of `find_state`.
        values: loaded tensors and objects, by parameter name and field.
        options: whose options the parameter groups are to have.
    """
    empty = iter(stored.empty_groups)
    for number, optimizer in enumerate(optimizers):
        groups, states, first = [], {}, 0
        for group in optimizer.param_groups:
            members = [names[param] for param in group["params"]]
            found = options_of_groups(members, stored) if members else next(empty, {})
            differing = [key for key in differing_options(members, stored) if key not in _OF_PROGRAM]
            if differing and options == "checkpoint":
                logger.warning(
                    "options of the optimizer: the parameters of a group had several values of %s, of which that of "
                    "most is used: %r",
                    _brief(differing),
                    {key: found.get(key) for key in differing[:3]},
                )
            numbers = list(range(first, first + len(members)))
            first += len(members)
            groups.append(_with_options(group, found if options == "checkpoint" else {}) | {"params": numbers})
            for place, name in zip(numbers, members, strict=True):
                fields = {**stored.plain.get(name, {}), **values.get(name, {})}
                if fields:
                    states[place] = {field: _as_saved(value, name, field, stored) for field, value in fields.items()}
        others = stored.others.get(str(number), {})
        optimizer.load_state_dict({**copy.deepcopy(others), "state": states, "param_groups": groups})
        if type(optimizer).load_state_dict is Optimizer.load_state_dict:
            is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
            _restore(optimizer, states, only_numbers=is_of_torch)
        place_steps(optimizer)
    _tell_differences(optimizers, names, stored)


def _with_options(group: Mapping[str, Any], options: Mapping[str, Any]) -> State:
    """A parameter group with stored options, in tensors where the program has tensors."""
    new = {key: value for key, value in group.items() if key != "params"}
    for key, value in options.items():
        if key in _OF_PROGRAM:
            continue
        own = group.get(key)
        new[key] = copy.deepcopy(value)
        if isinstance(own, torch.Tensor):
            new[key] = torch.as_tensor(value, dtype=own.dtype, device=own.device).clone()
    return new


def _as_saved(value: Any, name: str, field: str, stored: StoredState) -> Any:
    """A value as the optimizer had it, which may have been this rank's part of a `DTensor`."""
    return value._local_tensor if field in stored.local.get(name, ()) and is_divided(value) else value


def _restore(optimizer: Optimizer, states: Mapping[int, State], *, only_numbers: bool) -> None:
    """Gives states back what torch has cast to the type of their parameter, and texts, which it takes for lists.

    Args:
        optimizer: an optimizer that has been loaded.
        states: states that it was given.
        only_numbers: True to leave tensors with dimensions in the type of the parameter, as torch's optimizers need it.
    """
    for place, param in enumerate(_params_of([optimizer])):
        own = optimizer.state.get(param, {})
        for field, value in states.get(place, {}).items():
            if isinstance(value, torch.Tensor) and torch.is_tensor(own.get(field)):
                if field != "step" and not (only_numbers and value.dim()):
                    own[field] = value.to(own[field].device)
            elif field in own:
                own[field] = value


def _tell_differences(optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str], stored: StoredState) -> None:
    """Logs what found no place, and which parameters begin anew."""
    trained = [names[param] for param in _params_of(optimizers) if param.requires_grad]
    known = {*stored.keys, *stored.objects, *stored.plain}
    unused = sorted(known - {names[param] for param in _params_of(optimizers)})
    missing = [name for name in trained if name not in known]
    if unused:
        logger.warning(
            "state of the optimizer: that of %s is stored, but the optimizer does not have %s",
            _brief(unused),
            "it" if len(unused) == 1 else "them",
        )
    if missing and known:
        logger.warning("state of the optimizer: none is stored for %s, which begin anew", _brief(missing))


def _brief(names: Sequence[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {number_of(more, 'other')}" if more > 0 else "")
