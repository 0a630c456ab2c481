"""State of a model and its optimizer that all ranks write together, and any number of ranks can load.

Tensors of the model have the key `model.NAME`, those of the optimizer `optimizer.state.KEY.NAME`, as in Megatron Core's
checkpoints: `optimizer.state.exp_avg.decoder.weight`. The latter are one-dimensional, with the elements of their
parameter in order, since each rank has a range of these elements. All else is in the common state, in the format of
`DataParallelOptimizer.split_state_dict`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from trackbed.checkpoint import ShardedTensor
from trackbed.checkpoint.folder import CheckpointFolder, local_folder, open_for_all
from trackbed.checkpoint.format.catalogue import Catalogue
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.load import PartialRequest, check_parts
from trackbed.checkpoint.ranks import Ranks, meet
from trackbed.checkpoint.state.partial_tensors import is_part
from trackbed.checkpoint.state.sharded_tensor import check_key
from trackbed.comm.torch_group import check_initialized
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.grads import DistributedDataParallel
from trackbed.grads.model_agreement import GroupOfRanks, is_dense
from trackbed.grads.parameter_set import name_in_module
from trackbed.optim.optimizer import DataParallelOptimizer
from trackbed.optim.state_parts import StatePart
from trackbed.plural import number_of

_PARTS: Final = "parts"


def sharded_state(
    model: torch.nn.Module, optimizer: DataParallelOptimizer | None = None, *, group: Ranks = None, prefix: str = ""
) -> dict[str, Any]:
    """Collective over the ranks: returns the state of a model and its optimizer, for a save by all ranks together.

    `trackbed.save({**trackbed.sharded_state(model, optimizer), "step": 10}, folder)` on every rank. Each rank writes a
    share of the parameters, and its own part of the optimizer, of which it needs no second copy. Buffers, such as the
    statistics of BatchNorm, may differ between ranks: those of rank 0 are saved.

    The tensors are those of the model and of the optimizer, not copies.

    Args:
        model: `DistributedDataParallel`, of Trackbed or torch, or a module that is the same on all ranks.
        optimizer: optimizer of the model. None for the model alone.
        group: the ranks that have the model, as a `comm.Group` or a process group of torch; by default those of the
            wrapper, for another module those of `torch.distributed`, or this process alone.
        prefix: text before all keys, such as "generator.", so that several models fit into one checkpoint:
            `{**sharded_state(one, prefix="generator."), **sharded_state(other, prefix="average.")}`.

    Returns:
        State with the keys "model", and "optimizer" if there is one, after the prefix.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message. The optimizer is of another class or
            another model, or is not the last one of the model; the model was changed after it was wrapped; ranks have
            different experts; a tensor of the model is itself divided among ranks, as those of FSDP are; or a rank has
            no state of its part of a parameter, and others have.
    """
    model = _uncompiled(model)
    with meet("sharded_state", _ranks_of(model, group)) as meeting:
        _check(model, optimizer, prefix)
        meeting.group.agree("sharded_state", _arguments(optimizer, prefix))
        states = _entries(model, meeting.rank, prefix)
        lazy = [name for name, value in states.items() if is_lazy(value)]
        if lazy:
            raise ArgumentError(f"{lazy[0]} must have values to be saved, but is not initialised: call the model first")
        if meeting.rank > 0:
            names = _names_of_parameters(model)
            states = {name: value for name, value in states.items() if name in names}
        if optimizer is None:
            return {f"{prefix}model": states}
        common, parts = optimizer.split_state_dict()
        is_sharded = optimizer.model.engine.config.use_distributed_optimizer
        params = _named_parameters(optimizer)
        for part in parts:
            entry = _part_of_tensor(part, params[part.name].numel(), 0 if is_sharded else meeting.rank, prefix)
            common["state"].setdefault(part.name, {})[part.key] = entry
        return {f"{prefix}model": states, f"{prefix}optimizer": common}


def load_sharded_state(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: DataParallelOptimizer | None = None,
    *,
    allow_cast: bool = False,
    group: Ranks = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Collective over the ranks: loads what `sharded_state` has saved into a model and its optimizer.

    The number of ranks, the buckets and the sharding of the optimizer may differ from those that saved.

    Args:
        folder: folder of the checkpoint.
        model: model with the same names and shapes. What is empty in it, and extra state of any size, is loaded as it
            was saved, if the module's own `load_state_dict` takes it.
        optimizer: optimizer of the model. None for the model alone.
        allow_cast: True if tensors of the model, or those that torch's optimizer needs in another type, may be loaded
            into types that cannot hold all their values.
        group: the ranks; see `sharded_state`.
        prefix: text before the keys, with which the state was saved. Only these are read and checked.

    Returns:
        All other plain values of the checkpoint, such as "step", or the state of an optimizer of torch. The state of a
        `DataParallelOptimizer` that was not given is left out, as its tensors are not read. `load` reads further
        `ShardedTensor`s.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message: the arguments are not allowed, or the
            checkpoint is damaged or does not fit the model or the optimizer. Names, shapes and types are checked on all
            ranks first, and the optimizer's part is read: an error there leaves all as it was. Tensors of the model are
            then filled where they lie, without a second model in memory: damage that is found while they are read, or
            an error of the module's own `load_state_dict`, leaves the model loaded in part, which the message says.
    """
    model = _uncompiled(model)
    is_changed = False
    try:
        with meet("load_sharded_state", _ranks_of(model, group)) as meeting:
            _check(model, optimizer, prefix)
            meeting.group.agree("load_sharded_state", _arguments(optimizer, prefix))
            opened = open_for_all(local_folder(folder), meeting)
            common = opened.load_common()
            extra, wanted = _request_for_model(model, opened, common, meeting.rank, prefix, allow_cast=allow_cast)
            load_optimizer = None
            if optimizer is not None:
                saved = _saved_optimizer(common, folder, f"{prefix}optimizer")
                parts = {_PARTS: _wanted_parts(saved, optimizer, meeting.rank, prefix)}
                found = check_parts(parts, opened, rename=None, allow_cast=allow_cast).read(
                    {"state": {}, **saved}, meeting
                )
                load_optimizer = optimizer.check_split_state_dict(found, found.pop(_PARTS, {}), allow_cast=allow_cast)
            with BoxReader(opened.path, opened.catalogue) as reader:
                objects = {name: reader.read_object(key) for name, key in extra.items()}
            # Nothing is changed on any rank before all ranks have found that what is stored fits.
            meeting.group.barrier()
            is_changed = True
            if isinstance(model, DistributedDataParallel):
                model.wait_for_params()
            values = wanted.read({"model": common.pop(f"{prefix}model", {})}, meeting)["model"]
            if load_optimizer is not None:
                load_optimizer()
            _load_into(_inner(model), {**values, **objects})
    except CheckpointError as error:
        if not is_changed:
            raise
        raise CheckpointError(
            f"{error}; the model and the optimizer of this rank are loaded in part: load another checkpoint before "
            "they are used"
        ) from error
    if optimizer is not None:
        common.pop(f"{prefix}optimizer")
    return {key: value for key, value in common.items() if not _has_parts(value)}


def _request_for_model(
    model: torch.nn.Module,
    opened: CheckpointFolder,
    common: Mapping[str, Any],
    rank: int,
    prefix: str,
    *,
    allow_cast: bool,
) -> tuple[dict[str, str], PartialRequest]:
    """Keys of stored objects of a model, by name, and the request for its tensors, which are filled in place."""
    entries, catalogue = _entries(model, rank, prefix), opened.catalogue
    stored = {name_in_module(key): key for key in catalogue.tensors} | {key: key for key in catalogue.tensors}
    plain = common.get(f"{prefix}model", {})
    extra = _stored_objects(catalogue, entries, prefix)
    found = {*map(name_in_module, stored), *(f"{prefix}model.{name}" for name in extra)}
    _check_keys(opened.path, found, plain, entries, prefix)
    wanted = _wanted_tensors(entries, stored, catalogue, plain, prefix)
    return extra, check_parts({"model": wanted}, opened, rename=stored, allow_cast=allow_cast)


def _load_into(module: torch.nn.Module, values: Mapping[str, Any]) -> None:
    """Gives a module its state. What was filled in place is copied onto itself, so that hooks of the module see it."""
    own = {name_in_module(name): name for name in module.state_dict()}
    named = {name_in_module(name): value for name, value in values.items()}
    module.load_state_dict({own.get(name, name): value for name, value in named.items()})


def _check(model: torch.nn.Module, optimizer: DataParallelOptimizer | None, prefix: str) -> None:
    """Checks the arguments of both functions."""
    if not isinstance(prefix, str) or "model" in prefix.split("."):
        raise ArgumentError(
            f"prefix must be text without the part 'model', which begins the names of a model, but is {prefix!r}"
        )
    check_key(prefix)
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a module of torch, but is of {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        model.engine.check_unchanged()
    if optimizer is None:
        return
    if not isinstance(optimizer, DataParallelOptimizer):
        raise ArgumentError(
            f"optimizer must be a DataParallelOptimizer, but is of {type(optimizer).__name__}; save the state of "
            'another as a plain value, {"optimizer": optimizer.state_dict()}'
        )
    if optimizer.model is not model:
        raise ArgumentError("optimizer must be that of the model, but was made for another one")
    engine = optimizer.model.engine
    engine.check_attached(optimizer)
    if engine.experts.buffers:
        ranks, of_experts = engine.dense_collectives.size(), engine.expert_collectives.size()
        if ranks != of_experts:
            raise ArgumentError(
                f"all ranks must have the same experts, but {of_experts} of {ranks} ranks share them: give the "
                "parameters of each rank a key of their own with ShardedTensor"
            )


def _arguments(optimizer: DataParallelOptimizer | None, prefix: str) -> str:
    """Text about the arguments that must be the same on all ranks."""
    called = "called without an optimizer" if optimizer is None else "called with an optimizer"
    return f"{called} and the prefix {prefix!r}" if prefix else called


def _ranks_of(model: torch.nn.Module, group: Ranks) -> Ranks:
    """The ranks that have the same model."""
    if group is not None:
        return group
    if isinstance(model, DistributedDataParallel):
        ranks = model.engine.ranks
        return ranks.group if isinstance(ranks, GroupOfRanks) else ranks
    check_initialized("sharded_state")
    return model.process_group if isinstance(model, torch.nn.parallel.DistributedDataParallel) else None


def _uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The wrapper of a model, where that was compiled as a whole; anything else as it is."""
    inner = getattr(model, "_orig_mod", None)
    is_wrapper = isinstance(inner, DistributedDataParallel | torch.nn.parallel.DistributedDataParallel)
    return inner if is_wrapper else model  # type: ignore[return-value]


def _inner(model: torch.nn.Module) -> torch.nn.Module:
    """The module whose state has the names of the model."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def _entries(model: torch.nn.Module, rank: int, prefix: str) -> dict[str, Any]:
    """The state of the model, with entries in the place of its dense tensors that are initialised."""
    return {
        name: value
        if not isinstance(value, torch.Tensor) or is_lazy(value) or not is_dense(value)
        else _whole_tensor(name, value, rank, prefix)
        for name, value in ((name_in_module(key), value) for key, value in _inner(model).state_dict().items())
    }


def _names_of_parameters(model: torch.nn.Module) -> set[str]:
    """Names of the parameters in the state of the model, each name of one that is used in several places."""
    state = _inner(model).state_dict(keep_vars=True)
    return {name_in_module(name) for name, value in state.items() if isinstance(value, torch.nn.Parameter)}


def _named_parameters(optimizer: DataParallelOptimizer) -> dict[str, torch.nn.Parameter]:
    """Parameters of an optimizer's model, by their names in the module."""
    return {name_in_module(name): param for name, param in optimizer.model.module.named_parameters()}


def _whole_tensor(name: str, value: torch.Tensor, rank: int, prefix: str) -> ShardedTensor:
    """Entry of a tensor of the model, which all ranks have."""
    if is_part(value):
        raise ArgumentError(
            f"{name} must be the same tensor on all ranks, but is a {type(value).__name__}, as FSDP's are: save it "
            "with torch.distributed.checkpoint, or describe its local part with trackbed.ShardedTensor"
        )
    shape = tuple(value.shape)
    return ShardedTensor(
        f"{prefix}model.{name}", value.detach(), value.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape), rank
    )


def _part_of_tensor(part: StatePart, numel: int, replica_id: int, prefix: str) -> ShardedTensor:
    """Entry of this rank's part of a tensor of the optimizer."""
    key = _optimizer_key(part.name, part.key, prefix)
    return _range_of(key, part.value.reshape(-1), part.value.dtype, part.span or (0, 0), numel, replica_id)


def _optimizer_key(name: str, key: str, prefix: str) -> str:
    """Key of a tensor of the optimizer."""
    return f"{prefix}optimizer.state.{key}.{name}"


def _range_of(
    key: str, data: torch.Tensor | None, dtype: torch.dtype, span: tuple[int, int], numel: int, replica_id: int
) -> ShardedTensor:
    start, stop = span
    return ShardedTensor(key, data, dtype, (stop - start,), (numel,), (start,), None, replica_id)


def _saved_optimizer(common: Mapping[str, Any], folder: str | Path, name: str) -> Mapping[str, Any]:
    """State of the optimizer in the common state of a checkpoint."""
    saved = common.get(name)
    if not _has_parts(saved):
        found = f"of {type(saved).__name__}" if name in common else "none"
        where = "" if name == "optimizer" else f" as {name!r}"
        raise CheckpointError(
            f"{folder}: must have a state of the optimizer that sharded_state saved{where}, found {found}: read "
            "another with trackbed.load, such as the state_dict() of torch's optimizer, give it to "
            "load_state_dict(), and leave the optimizer out here"
        )
    return saved


def _has_parts(state: Any) -> TypeGuard[Mapping[str, Any]]:
    """True for the state of an optimizer whose tensors `sharded_state` has saved apart."""
    return isinstance(state, Mapping) and isinstance(state.get("divided"), Mapping)


def _wanted_parts(
    saved: Mapping[str, Any], optimizer: DataParallelOptimizer, rank: int, prefix: str
) -> dict[str, dict[str, ShardedTensor]]:
    """Entries of the tensors that this rank needs: ranges of updated tensors, and frozen tensors as a whole."""
    params = _named_parameters(optimizer)
    trained, spans = set(optimizer.model.engine.params), optimizer.spans()
    is_sharded = optimizer.model.engine.config.use_distributed_optimizer
    entries: dict[str, dict[str, ShardedTensor]] = {}
    for saved_name, types in saved["divided"].items():
        name = name_in_module(saved_name)
        if name not in params or (params[name] in trained and name not in spans):
            continue
        if not isinstance(types, Mapping):
            raise CheckpointError(
                f"state of the optimizer: must have a dictionary for {name} under 'divided', found {types!r}"
            )
        numel = params[name].numel()
        span = spans.get(name, (0, numel))
        replica_id = 0 if is_sharded and name in spans else rank
        entries[name] = {
            key: _range_of(_optimizer_key(name, key, prefix), None, _type_of(dtype), span, numel, replica_id)
            for key, dtype in types.items()
        }
    return entries


def _wanted_tensors(
    entries: Mapping[str, Any], stored: Mapping[str, str], catalogue: Catalogue, plain: Any, prefix: str
) -> dict[str, ShardedTensor]:
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
    wanted = {}
    for name, entry in entries.items():
        key = f"{prefix}model.{name}"
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


def _type_of(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"state of the optimizer: must name types of torch under 'divided', found {name!r}")
    return found


def _check_keys(folder: str | Path, stored: set[str], plain: Any, entries: Mapping[str, Any], prefix: str) -> None:
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
    stored_keys = {key for key in stored if key.startswith(start)}
    if model_keys - empty and not stored_keys:
        raise CheckpointError(
            f"{folder}: must be a checkpoint of sharded_state, but has no {start}* tensors{_hint_of_prefixes(stored)}: "
            "`trackbed ckpt ls` lists those that it has, and trackbed.open_checkpoint reads them"
        )
    stored_keys |= {f"{start}{name_in_module(name)}" for name in plain} if isinstance(plain, Mapping) else set()
    if model_keys - empty - stored_keys:
        raise CheckpointError(
            f"{folder}: must have every tensor of the model, but lacks {_first_of(model_keys - empty - stored_keys)}"
        )
    if stored_keys - model_keys:
        raise CheckpointError(
            f"{folder}: the model must have every tensor of the checkpoint, but lacks "
            f"{_first_of(stored_keys - model_keys)}"
        )


def _hint_of_prefixes(stored: set[str]) -> str:
    """Names the prefixes of models in a checkpoint, such as "generator."."""
    starts = {key.partition("model.")[0] for key in stored if "model." in key}
    found = sorted(start for start in starts if not start or start.endswith("."))
    return f", but some with the prefix {', '.join(map(repr, found[:5]))}" if found else ""


def _first_of(keys: set[str]) -> str:
    more = f" and {number_of(len(keys) - 1, 'other')}" if len(keys) > 1 else ""
    return min(keys) + more
