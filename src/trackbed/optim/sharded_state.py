"""State of a model and its optimizer that all ranks write together, and any number of ranks can load.

Tensors of the model have the key `model.NAME`. Those of torch's optimizers (`torch_state`) have the keys of torch,
`optimizer.state.NAME.KEY`; those of a `DataParallelOptimizer` (`own_state`) have Megatron Core's,
`optimizer.state.exp_avg.decoder.weight`. All have the shapes of their parameters. All else is in the common state.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from trackbed.checkpoint import ShardedTensor
from trackbed.checkpoint.folder import CheckpointFolder, any_folder, open_for_all
from trackbed.checkpoint.io.boxes import BoxReader
from trackbed.checkpoint.load import check_parts
from trackbed.checkpoint.ranks import Meeting, Ranks, meet
from trackbed.checkpoint.state.divided_tensors import is_divided
from trackbed.checkpoint.state.sharded_tensor import check_key
from trackbed.comm.torch_group import check_initialized
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.grads import DistributedDataParallel
from trackbed.grads.model_agreement import GroupOfRanks, is_dense
from trackbed.grads.parameter_set import name_in_module
from trackbed.optim.in_checkpoints.model_state import (
    entries_of_models,
    inner_module,
    load_into,
    names_by_parameter,
    names_of_parameters,
    request_for_model,
    stored_keys,
    whole_tensor,
    with_versions_of,
)
from trackbed.optim.in_checkpoints.own_state import (
    has_parts,
    named_parameters,
    state_of_own,
    stored_state_of_own,
    wanted_parts,
)
from trackbed.optim.in_checkpoints.placed_model import entries_of_model, tensors_with_entries, with_tensors
from trackbed.optim.in_checkpoints.placed_parts import NO_PLACES, Places, places_of_entries
from trackbed.optim.in_checkpoints.placed_state import find_placed_state, refuse_shifted, wanted_placed_parts
from trackbed.optim.in_checkpoints.stored_state import KEY_ORDERS, KeyOrder, find_state
from trackbed.optim.in_checkpoints.torch_state import (
    OPTIONS,
    Options,
    check_optimizers,
    load_state,
    read_objects,
    request_for,
    state_of,
)
from trackbed.optim.optimizer import DataParallelOptimizer

Models: TypeAlias = torch.nn.Module | Sequence[torch.nn.Module]
Optimizers: TypeAlias = DataParallelOptimizer | torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_PARTS: Final = "parts"


def sharded_state(
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    group: Ranks = None,
    prefix: str = "",
    key_order: KeyOrder = "megatron",
    entries: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Collective over the ranks: returns the state of a model and its optimizer, for a save by all ranks together.

    `trackbed.save({**trackbed.sharded_state(model, optimizer), "step": 10}, folder)` on every rank. Each rank writes a
    share of the parameters, and its own part of the optimizer, of which it needs no second copy. Buffers, such as the
    statistics of BatchNorm, may differ between ranks: those of the first rank that has them are saved.

    The tensors are those of the model and of the optimizer, not copies. Names and tensors of torch's optimizers are
    those of `torch.distributed.checkpoint.state_dict.get_state_dict`, and nothing is changed: an optimizer that has not
    stepped has no state.

    Args:
        model: any module or a list of modules with different names: plain and the same on all ranks, wrapped by
            `DistributedDataParallel`, of Trackbed or torch, divided by `fully_shard` or tensor parallelism, compiled.
        optimizer: optimizer of the model: a `DataParallelOptimizer`, one of torch, or a list of these. None for the
            model alone.
        group: the ranks that have the model, as a `comm.Group` or a process group of torch; by default those of the
            wrapper, for another module those of `torch.distributed`, or this process alone.
        prefix: text before all keys, such as "generator.", so that several models fit into one checkpoint:
            `{**sharded_state(one, prefix="generator."), **sharded_state(other, prefix="average.")}`.
        key_order: keys of the tensors of a `DataParallelOptimizer`: `optimizer.state.KEY.NAME` as "megatron" has them,
            or `optimizer.state.NAME.KEY` as "torch" does. `load_sharded_state` reads both.
        entries: a `ShardedTensor`, or a factory of some, for each tensor of one module by its name in
            `state_dict(keep_vars=True)`, as `sharded_state_dict()` of Megatron Core's models returns them: ranks have
            parts of larger tensors, stacked layers, or stages of a pipeline. Model and `DataParallelOptimizer` are
            stored under their keys, as Megatron Core reads them in its format `fully_reshardable`. A number of a copy
            is a tuple, whose last one counts the ranks of the wrapper. Stages have as many parameter groups, in one
            order; layers that are stacked have one group, or several with the same options.

    Returns:
        State with the keys "model", and "optimizer" if there is one, after the prefix.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message. The optimizer is of another class or
            another model, or is not the last one of the model; the model was changed after it was wrapped, or is on the
            meta device; ranks have different experts; a tensor of the model is itself divided among ranks in another
            way than as a `DTensor` or by `entries`; or a rank has no state of its part of a parameter, and others have.
    """
    models = _models_of(model)
    with meet("sharded_state", _ranks_of(models, group)) as meeting:
        _check(models, optimizer, prefix)
        if key_order not in KEY_ORDERS:
            raise ArgumentError(f"key_order: must be 'megatron' or 'torch', found {key_order!r}")
        arguments = _arguments(optimizer, prefix, has_entries=entries is not None)
        meeting.group.agree("sharded_state", f"{arguments}, keys as {key_order} has them")
        if entries is not None:
            if key_order != "megatron":
                raise ArgumentError("key_order: must be 'megatron' with entries, whose keys these are")
            return _placed_state(models, optimizer, entries, meeting.rank, prefix)
        states = entries_of_models(models, meeting.rank, prefix)
        lazy = [name for name, value in states.items() if is_lazy(value)]
        if lazy:
            raise ArgumentError(f"{lazy[0]} must have values to be saved, but is not initialised: call the model first")
        divides = any(map(is_divided, states.values()))
        if divides:
            # `save` stores plain tensors beside DTensors as tensors, those of the first rank that has them.
            states = {name: value.data if isinstance(value, ShardedTensor) else value for name, value in states.items()}
        elif meeting.rank > 0:
            parameters = names_of_parameters(models)
            states = {name: value for name, value in states.items() if name in parameters}
        state: dict[str, Any] = {f"{prefix}model": with_versions_of(models, states)}
        if isinstance(optimizer, DataParallelOptimizer):
            state[f"{prefix}optimizer"] = state_of_own(optimizer, meeting.rank, prefix, key_order)
        elif optimizer is not None:
            optimizers, params = _optimizers_of(optimizer), names_by_parameter(models)
            found = state_of(optimizers, params, meeting, prefix)
            state[f"{prefix}optimizer"] = found if divides else _with_entries(found, meeting.rank, prefix)
        return state


def _placed_state(
    models: Sequence[torch.nn.Module], optimizer: Any, entries: Mapping[str, Any], rank: int, prefix: str
) -> dict[str, Any]:
    """State of a model and its optimizer under the keys of entries."""
    module, places = _placed(models, optimizer, entries)
    state: dict[str, Any] = {f"{prefix}model": entries_of_model(module, entries, places, prefix, saves=True)}
    if optimizer is not None:
        state[f"{prefix}optimizer"] = state_of_own(optimizer, rank, prefix, "megatron", places)
    return state


def _placed(
    models: Sequence[torch.nn.Module], optimizer: Any, entries: Mapping[str, Any]
) -> tuple[torch.nn.Module, Places]:
    """The module, and the places of its tensors that entries describe."""
    if len(models) != 1 or not isinstance(optimizer, DataParallelOptimizer | None):
        raise ArgumentError("entries: must be those of one module, alone or with its DataParallelOptimizer")
    if not isinstance(entries, Mapping):
        raise ArgumentError(f"entries: must be a dictionary of entries by name, but is of {type(entries).__name__}")
    module = inner_module(models[0])
    return module, places_of_entries(entries, tensors_with_entries(module, entries))


def _with_entries(state: dict[str, Any], rank: int, prefix: str) -> dict[str, Any]:
    """State of optimizers of torch with entries in the places of its tensors, which all ranks have."""
    entries = {
        name: {
            field: whole_tensor(f"{prefix}optimizer.state.{name}.{field}", value, rank)
            if isinstance(value, torch.Tensor) and is_dense(value)
            else value
            for field, value in fields.items()
        }
        for name, fields in state["state"].items()
    }
    return {**state, "state": entries}


def load_sharded_state(
    folder: str | Path,
    model: Models,
    optimizer: Optimizers | None = None,
    *,
    allow_cast: bool = False,
    options: Options = "checkpoint",
    group: Ranks = None,
    prefix: str = "",
    entries: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Collective over the ranks: loads what `sharded_state` has saved into a model and its optimizer.

    The number of ranks, the meshes, the buckets and the sharding of the optimizer may differ from those that saved.
    Checkpoints of `torch.distributed.checkpoint` are read, too: with the model under "model" or at the top, and the
    optimizer nested or flattened.

    Args:
        folder: folder of the checkpoint, or its address in an object store.
        model: model with the same names and shapes; see `sharded_state`. What is empty in it, and extra state of any
            size, is loaded as it was saved, if the module's own `load_state_dict` takes it.
        optimizer: optimizer of the model. None for the model alone. One of torch gets its state without a step; states
            are matched by the names of parameters, of which more or fewer may be stored, in other groups.
        allow_cast: True if tensors of the model, or those that torch's optimizer needs in another type, may be loaded
            into types that cannot hold all their values.
        options: whose options the parameter groups of torch's optimizers have afterwards: those of the "checkpoint",
            such as the learning rate of a schedule, or those of the "program". How the update is computed ("foreach",
            "fused", "capturable", "differentiable") is always the program's choice.
        group: the ranks; see `sharded_state`.
        prefix: text before the keys, with which the state was saved. Only these are read and checked.
        entries: see `sharded_state`. Checkpoints are read that were saved with entries, of any other parallelism, or by
            Megatron Core with its optimizer in the format `fully_reshardable`.

    Returns:
        All other plain values of the checkpoint, such as "step", or the state of an optimizer of torch that was saved
        as a plain value. The state of an optimizer that was not given is left out, as its tensors are not read. `load`
        reads further `ShardedTensor`s.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message: the arguments are not allowed, or the
            checkpoint is damaged or does not fit the model or the optimizer. Names, shapes and types are checked on all
            ranks first, and the part of a `DataParallelOptimizer` is read: an error there leaves all as it was. Tensors
            of the model, and of torch's optimizers, are then filled where they lie, without a second model in memory:
            damage that is found while they are read, or an error of the module's own `load_state_dict`, leaves them
            loaded in part, which the message says.
    """
    models = _models_of(model)
    is_changed = False
    try:
        with meet("load_sharded_state", _ranks_of(models, group)) as meeting:
            _check(models, optimizer, prefix)
            if options not in OPTIONS:
                raise ArgumentError(f"options: must be 'checkpoint' or 'program', found {options!r}")
            arguments = _arguments(optimizer, prefix, has_entries=entries is not None)
            meeting.group.agree("load_sharded_state", arguments)
            opened = open_for_all(any_folder(folder), meeting)
            common = opened.load_common(_is_of_model_or_optimizer)
            extra, places = dict[str, str](), NO_PLACES
            if entries is not None:
                module, places = _placed(models, optimizer, entries)
                own = {f"{prefix}model": entries_of_model(module, entries, places, prefix, saves=False)}
                wanted = check_parts(own, opened, rename=None, allow_cast=allow_cast)
            else:
                extra, wanted = request_for_model(models, opened, common, meeting.rank, prefix, allow_cast=allow_cast)
            load_optimizer: Callable[[], None] | None = None
            if isinstance(optimizer, DataParallelOptimizer):
                load_optimizer = _loader_of_own(
                    optimizer, opened, common, meeting, prefix, places, allow_cast=allow_cast
                )
            elif optimizer is not None:
                load_optimizer = _loader_of_torchs(
                    _optimizers_of(optimizer), models, opened, common, meeting, prefix, options, allow_cast=allow_cast
                )
            with BoxReader(opened.path, opened.catalogue) as reader:
                reader.expect(extra.values())
                objects = {name: reader.read_object(key) for name, key in extra.items()}
            # Nothing is changed on any rank before all ranks have found that what is stored fits.
            meeting.group.barrier()
            is_changed = True
            for one in models:
                if isinstance(one, DistributedDataParallel):
                    one.wait_for_params()
            values = wanted.read({f"{prefix}model": common.pop(f"{prefix}model", {})}, meeting)[f"{prefix}model"]
            if entries is not None:
                values = with_tensors(module, values)
            if load_optimizer is not None:
                load_optimizer()
            values.update(objects)
            load_into(models, values)
    except CheckpointError as error:
        if not is_changed:
            raise
        raise CheckpointError(
            f"{error}; the model and the optimizer of this rank are loaded in part: load another checkpoint before "
            "they are used"
        ) from error
    if optimizer is not None:
        common.pop(f"{prefix}optimizer", None)
    others = {key: value for key, value in common.items() if not has_parts(value)}
    return {key: value for key, value in others.items() if not _has_versions_alone(value)}


def _loader_of_own(
    optimizer: DataParallelOptimizer,
    opened: CheckpointFolder,
    common: Mapping[str, Any],
    meeting: Meeting,
    prefix: str,
    places: Places,
    *,
    allow_cast: bool,
) -> Callable[[], None]:
    """Collective over the ranks: reads and checks this rank's part of an optimizer; returns a function to load it."""
    saved: Mapping[str, Any]
    if places:
        params = named_parameters(optimizer)
        placed = find_placed_state(optimizer, params, opened, common, prefix, places)
        refuse_shifted(placed, optimizer, params, opened, meeting, prefix, places)
        saved, parts = placed.plain, wanted_placed_parts(placed, optimizer, params, prefix, places)
        request = check_parts({_PARTS: parts}, opened, rename=None, allow_cast=allow_cast)
    else:
        keys = stored_keys(opened.catalogue)
        saved = stored_state_of_own(optimizer, opened, common, prefix, meeting.rank)
        parts = wanted_parts(saved, optimizer, keys, opened, prefix)
        request = check_parts({_PARTS: parts}, opened, rename=keys, allow_cast=allow_cast)
    found = request.read({"state": {}, **saved}, meeting)
    return optimizer.check_split_state_dict(found, found.pop(_PARTS, {}), allow_cast=allow_cast)


def _has_versions_alone(value: Any) -> bool:
    """True for what is left in the plain values of a model, all of whose tensors are stored apart."""
    return isinstance(value, OrderedDict) and not value and hasattr(value, "_metadata")


def _is_of_model_or_optimizer(key: str) -> bool:
    """True for keys of tensors and objects of models and optimizers, under any prefix."""
    return not {"model", "optimizer"}.isdisjoint(key.split("."))


def _loader_of_torchs(
    optimizers: Sequence[torch.optim.Optimizer],
    models: Sequence[torch.nn.Module],
    opened: CheckpointFolder,
    common: Mapping[str, Any],
    meeting: Meeting,
    prefix: str,
    options: Options,
    *,
    allow_cast: bool,
) -> Callable[[], None]:
    """Checks the stored state of optimizers of torch, and returns a function that loads it, collective as `load` is."""
    names = names_by_parameter(models)
    members = [[names[param] for param in group["params"]] for one in optimizers for group in one.param_groups]
    stored = find_state(opened, common, prefix, meeting.rank, members if len(optimizers) == 1 else None)
    objects = read_objects(stored, set(names.values()), opened, meeting.size)
    wanted = {"state": request_for(stored, optimizers, names, opened)}
    request = check_parts(wanted, opened, rename=None, allow_cast=allow_cast)

    def load() -> None:
        values = request.read({"state": {}}, meeting)["state"]
        both = {name: {**objects.get(name, {}), **values.get(name, {})} for name in {**objects, **values}}
        load_state(optimizers, names, stored, both, options)

    return load


def _models_of(model: Models) -> list[torch.nn.Module]:
    """The models, each as its wrapper where that was compiled as a whole."""
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model]
    return [_uncompiled(one) for one in models]


def _optimizers_of(optimizer: Any) -> list[Any]:
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def _check(models: Sequence[torch.nn.Module], optimizer: Optimizers | None, prefix: str) -> None:
    """Checks the arguments of both functions."""
    if not isinstance(prefix, str) or "model" in prefix.split("."):
        raise ArgumentError(
            f"prefix must be text without the part 'model', which begins the names of a model, but is {prefix!r}"
        )
    check_key(prefix)
    if not models:
        raise ArgumentError("model must be a module of torch, or a list of at least one, but is an empty list")
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"model must be a module of torch, but is of {type(model).__name__}")
        if isinstance(model, DistributedDataParallel):
            model.engine.check_unchanged()
        for name, param in model.named_parameters():
            if param.is_meta:
                raise ArgumentError(
                    f"{name_in_module(name)} must have memory, but is on the meta device: call "
                    'model.to_empty(device="cpu") first, or that of the GPU'
                )
    _check_different_names(models)
    _divide_again(models)
    if isinstance(optimizer, DataParallelOptimizer):
        _check_own_optimizer(models, optimizer)
    elif optimizer is not None:
        check_optimizers(_optimizers_of(optimizer), names_by_parameter(models))


def _divide_again(models: Sequence[torch.nn.Module]) -> None:
    """Puts the parts of FSDP2's parameters in the place of the whole ones, which an evaluation has left there."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in [one for model in models for one in model.modules()] if fsdp is not None else []:
        if isinstance(module, fsdp.FSDPModule):  # type: ignore[union-attr]  # there are models
            module.reshard()


def _check_different_names(models: Sequence[torch.nn.Module]) -> None:
    seen = set[str]()
    for model in models if len(models) > 1 else ():
        names = {name_in_module(name) for name in inner_module(model).state_dict()}
        if names & seen:
            raise ArgumentError(
                f"model: the modules of a list must have different names, but two have {min(names & seen)}: save each "
                "with a prefix"
            )
        seen |= names


def _check_own_optimizer(models: Sequence[torch.nn.Module], optimizer: DataParallelOptimizer) -> None:
    if len(models) != 1 or optimizer.model is not models[0]:
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


def _arguments(optimizer: Optimizers | None, prefix: str, *, has_entries: bool) -> str:
    """Text about the arguments that must be the same on all ranks."""
    called = "called without an optimizer" if optimizer is None else "called with an optimizer"
    called += ", with entries" if has_entries else ""
    return f"{called} and the prefix {prefix!r}" if prefix else called


def _ranks_of(models: Sequence[torch.nn.Module], group: Ranks) -> Ranks:
    """The ranks that have the same model."""
    if group is not None:
        return group
    for model in models:
        if isinstance(model, DistributedDataParallel):
            ranks = model.engine.ranks
            return ranks.group if isinstance(ranks, GroupOfRanks) else ranks
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            return model.process_group
    check_initialized("sharded_state")
    return None


def _uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The wrapper of a model, where that was compiled as a whole; anything else as it is."""
    inner = getattr(model, "_orig_mod", None)
    is_wrapper = isinstance(inner, DistributedDataParallel | torch.nn.parallel.DistributedDataParallel)
    return inner if is_wrapper else model  # type: ignore[return-value]
