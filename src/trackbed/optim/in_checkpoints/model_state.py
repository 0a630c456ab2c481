"""State of models in a checkpoint: entries for their tensors, and checks of what is loaded into them."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from trackbed.checkpoint import ShardedTensor
from trackbed.checkpoint.folder import CheckpointFolder
from trackbed.checkpoint.format.catalogue import Catalogue
from trackbed.checkpoint.format.safetensors_files import SUFFIX
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.load import PartialRequest, check_parts
from trackbed.checkpoint.state.aliases import memory_of
from trackbed.checkpoint.state.divided_tensors import is_divided
from trackbed.checkpoint.state.partial_tensors import is_part
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.grads.model_agreement import is_dense
from trackbed.grads.parameter_set import name_in_module
from trackbed.plural import number_of


def request_for_model(
    models: Sequence[torch.nn.Module],
    opened: CheckpointFolder,
    common: Mapping[str, Any],
    rank: int,
    prefix: str,
    *,
    allow_cast: bool,
) -> tuple[dict[str, str], PartialRequest]:
    """Keys of stored objects of a model, by name, and the request for its tensors, which are filled in place."""
    entries, catalogue = entries_of_models(models, rank, prefix), opened.catalogue
    start = f"{prefix}model."
    keys = stored_keys(catalogue)
    keys |= _keys_of_tied(entries, keys, start)
    plain = common.get(f"{prefix}model", {})
    extra = _stored_objects(catalogue, entries, prefix)
    tensors = {name for name, value in entries.items() if isinstance(value, ShardedTensor) or is_divided(value)}
    if tensors <= keys.keys() and not all(f"{start}{name}" in keys for name in tensors):
        keys = {f"{start}{name}": keys[name] for name in tensors}  # at the top, as in torchtitan and safetensors
        _check_all_used(opened, set(keys.values()))
    found = {*map(name_in_module, keys), *(f"{start}{name}" for name in extra)}
    _check_keys(opened.path, found, plain, entries, prefix)
    wanted = {f"{prefix}model": _wanted_tensors(entries, keys, catalogue, plain, prefix)}
    return extra, check_parts(wanted, opened, rename=keys, allow_cast=allow_cast)


def entries_of_models(models: Iterable[torch.nn.Module], rank: int, prefix: str) -> dict[str, Any]:
    """The state of the models, with entries in the place of dense tensors that are initialised, but for `DTensor`s."""
    return {
        name: value
        if not isinstance(value, torch.Tensor) or is_lazy(value) or is_divided(value) or not is_dense(value)
        else whole_tensor(f"{prefix}model.{name}", value, rank)
        for model in models
        for name, value in ((name_in_module(key), value) for key, value in inner_module(model).state_dict().items())
    }


def names_of_parameters(models: Iterable[torch.nn.Module]) -> set[str]:
    """Names of the parameters in the state of the models, each name of one that is used in several places."""
    return {
        name_in_module(name)
        for model in models
        for name, value in inner_module(model).state_dict(keep_vars=True).items()
        if isinstance(value, torch.nn.Parameter)
    }


def names_by_parameter(models: Iterable[torch.nn.Module]) -> dict[torch.Tensor, str]:
    """Name of each parameter, the first one of those that are used in several places."""
    return {param: name_in_module(name) for model in models for name, param in inner_module(model).named_parameters()}


def whole_tensor(key: str, value: torch.Tensor, rank: int) -> ShardedTensor:
    """Entry of a tensor that all ranks have."""
    if is_part(value):
        raise ArgumentError(
            f"{key} must be the same tensor on all ranks, or a DTensor, but is a {type(value).__name__}: describe its "
            "local part with trackbed.ShardedTensor"
        )
    shape = tuple(value.shape)
    return ShardedTensor(key, value.detach(), value.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape), rank)


def with_versions_of(models: Iterable[torch.nn.Module], states: Mapping[str, Any]) -> Any:
    """State of models with the versions of their classes, as that of a module has them."""
    found = OrderedDict(states)
    vars(found)["_metadata"] = {
        name_in_module(name): version
        for model in models
        for name, version in getattr(inner_module(model).state_dict(), "_metadata", {}).items()
    }
    return found


def inner_module(model: torch.nn.Module) -> torch.nn.Module:
    """The module whose state has the names of the model."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    inner: torch.nn.Module = model.module if isinstance(model, wrappers) else model
    return inner


def load_into(models: Sequence[torch.nn.Module], values: Mapping[str, Any]) -> None:
    """Gives modules their state. What was filled in place is copied onto itself, so that their hooks see it."""
    named = {name_in_module(name): value for name, value in values.items()}
    stored = getattr(values, "_metadata", {})
    for module in map(inner_module, models):
        state: Any = module.state_dict()
        own = {name_in_module(name): name for name in state}
        if len(models) == 1:
            own = {**{name: name for name in named}, **own}
        given = OrderedDict((own[name], value) for name, value in named.items() if name in own)
        versions = getattr(state, "_metadata", {}).items()
        vars(given)["_metadata"] = {name: stored.get(name_in_module(name), version) for name, version in versions}
        module.load_state_dict(given)


def stored_keys(catalogue: Catalogue) -> dict[str, str]:
    """Keys of stored tensors, by the names of a module that is not compiled and by themselves."""
    return {name_in_module(key): key for key in catalogue.tensors} | {key: key for key in catalogue.tensors}


def _keys_of_tied(entries: Mapping[str, Any], stored: Mapping[str, str], start: str) -> dict[str, str]:
    """Stored keys for names that are not stored, of tensors that have another name which is: tied weights.

    Files of safetensors have one name of such tensors.
    """
    names: dict[Any, list[str]] = {}
    for name, value in entries.items():
        tensor = value.data if isinstance(value, ShardedTensor) else value._local_tensor if is_divided(value) else None
        if tensor is not None and tensor.layout is torch.strided:
            names.setdefault(memory_of(tensor), []).append(name)
    found: dict[str, str] = {}
    for same in names.values():
        for at in (start, ""):
            known = [stored[f"{at}{name}"] for name in same if f"{at}{name}" in stored]
            found |= {f"{at}{name}": known[0] for name in same if known and f"{at}{name}" not in stored}
    return found


def _check_all_used(opened: CheckpointFolder, used: set[str]) -> None:
    """Checks that a model takes all tensors of files of safetensors, which have nothing else."""
    unused = opened.catalogue.tensors.keys() - used
    if unused and all(name.endswith(SUFFIX) for name in opened.catalogue.files):
        raise CheckpointError(
            f"{opened.path}: the model must have every tensor of the checkpoint, but lacks {_first_of(unused)}"
        )


def _wanted_tensors(
    entries: Mapping[str, Any], stored: Mapping[str, str], catalogue: Catalogue, plain: Any, prefix: str
) -> dict[str, Any]:
    """Entries of the tensors of the model that are read, where they lie if no other has the same memory.

    What is empty or not initialised in the model, and extra state, is read in the shape and type that it was saved in,
    as it may have grown: the module's own `load_state_dict` takes or refuses it.

    Args:
        entries: state of the model.
        stored: stored keys of tensors, by the keys of the model.
        catalogue: contents of the checkpoint.
        plain: plain values of the model in it.
        prefix: text before the keys.
    """
    plain_names = {name_in_module(name) for name in plain} if isinstance(plain, Mapping) else set()
    in_place = _filled_in_place(entries)
    wanted: dict[str, Any] = {}
    for name, entry in entries.items():
        key = f"{prefix}model.{name}"
        if is_divided(entry):
            wanted[name] = entry
            continue
        is_tensor = isinstance(entry, ShardedTensor)
        may_grow = _is_extra_state(name) or is_lazy(entry) or (is_tensor and 0 in entry.global_shape)
        if may_grow and key in stored:
            tensor = catalogue.tensors[stored[key]]
            whole = tensor.shape, tensor.shape, (0,) * len(tensor.shape)
            wanted[name] = ShardedTensor(key, None, tensor.dtype, *whole, None)
        elif is_tensor and name not in plain_names:
            wanted[name] = entry if name in in_place else entry.without_data()
    return wanted


def _filled_in_place(entries: Mapping[str, Any]) -> set[str]:
    """Names of the tensors that are filled where they lie: of several that share memory, the first alone.

    The module copies the others over it, one after the other, as if none had been filled.
    """
    spans = []
    for number, (name, entry) in enumerate(entries.items()):
        value = entry.data if isinstance(entry, ShardedTensor) else None
        if value is not None and value.numel() and value.device.type in ("cpu", "cuda") and not _is_expanded(value):
            length = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
            start = value.data_ptr()
            spans.append((str(value.device), start, start + length * value.itemsize, number, name))
    kept: list[tuple[int, str]] = []
    last_device, last_end = "", 0
    for device, start, end, number, name in sorted(spans):
        if device != last_device or start >= last_end:
            kept.append((number, name))
            last_device, last_end = device, end
        else:
            kept[-1] = min(kept[-1], (number, name))
            last_end = max(last_end, end)
    return {name for _, name in kept}


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _stored_objects(catalogue: Catalogue, entries: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Keys of objects with extra state, by name: torch's checkpoints have it where it is no tensor."""
    stored = {name_in_module(key): key for key in catalogue.objects}
    keys = {name: f"{prefix}model.{name}" for name in entries if _is_extra_state(name)}
    return {name: stored[key] for name, key in keys.items() if key in stored}


def _is_extra_state(name: str) -> bool:
    """True for the name of what a module's `get_extra_state` returns."""
    return name.rpartition(".")[2] == "_extra_state"


def _check_keys(folder: AnyFolder, stored: set[str], plain: Any, entries: Mapping[str, Any], prefix: str) -> None:
    """Checks that the checkpoint and the model have the same tensors and values.

    Args:
        folder: folder of the checkpoint, for errors.
        stored: keys of its tensors.
        plain: plain values of the model in it.
        entries: state of the model. Tensors without elements need not be stored.
        prefix: text before the keys.
    """
    start = f"{prefix}model."
    model_keys = {f"{start}{name}" for name in entries}
    empty = {one.key for one in entries.values() if isinstance(one, ShardedTensor) and 0 in one.global_shape}
    found = {key for key in stored if key.startswith(start)}
    if model_keys - empty and not found:
        raise CheckpointError(
            f"{folder}: must be a checkpoint of sharded_state, but has no {start}* tensors{_hint_of_prefixes(stored)}: "
            "`trackbed ckpt ls` lists those that it has, and trackbed.open_checkpoint reads them"
        )
    found |= {f"{start}{name_in_module(name)}" for name in plain} if isinstance(plain, Mapping) else set()
    if model_keys - empty - found:
        raise CheckpointError(
            f"{folder}: must have every tensor of the model, but lacks {_first_of(model_keys - empty - found)}"
        )
    if found - model_keys:
        raise CheckpointError(
            f"{folder}: the model must have every tensor of the checkpoint, but lacks {_first_of(found - model_keys)}"
        )


def _hint_of_prefixes(stored: set[str]) -> str:
    """Names the prefixes of models in a checkpoint, such as "generator."."""
    starts = {key.partition("model.")[0] for key in stored if "model." in key}
    found = sorted(start for start in starts if not start or start.endswith("."))
    return f", but some with the prefix {', '.join(map(repr, found[:5]))}" if found else ""


def _first_of(keys: AbstractSet[str]) -> str:
    more = f" and {number_of(len(keys) - 1, 'other')}" if len(keys) > 1 else ""
    return min(keys) + more
