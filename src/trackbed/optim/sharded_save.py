"""State of a model and its optimizer that all ranks write together, and any number of ranks can load.

Tensors of the model have the key `model.NAME`, those of the optimizer `optimizer.state.KEY.NAME`, as in Megatron Core's
checkpoints: `optimizer.state.exp_avg.decoder.weight`. The latter are one-dimensional, with the elements of their
parameter in order, since each rank has a range of these elements. All else is in the common state, in the format of
`DataParallelOptimizer.split_state_dict`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from trackbed.checkpoint import ShardedTensor, load
from trackbed.checkpoint.folder import local_folder, open_for_all
from trackbed.checkpoint.meeting import Ranks, meet
from trackbed.checkpoint.parts import is_part
from trackbed.comm.torch import check_initialized
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.grads import DistributedDataParallel
from trackbed.grads.parameters import name_in_module
from trackbed.grads.process_groups import GroupOfRanks
from trackbed.optim.full_state import Part
from trackbed.optim.optimizer import DataParallelOptimizer
from trackbed.plural import number_of

__all__ = ["load_sharded_state", "sharded_state"]

_PARTS: Final = "parts"


def sharded_state(
    model: torch.nn.Module, optimizer: DataParallelOptimizer | None = None, *, group: Ranks = None
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

    Returns:
        State with the keys "model", and "optimizer" if there is one.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message. The optimizer is of another class or
            another model, or is not the last one of the model; the model was changed after it was wrapped; ranks have
            different experts; a tensor of the model is itself divided among ranks, as those of FSDP are; or a rank has
            no state of its part of a parameter, and others have.
    """
    model = _uncompiled(model)
    with meet("sharded_state", _ranks_of(model, group)) as meeting:
        _check(model, optimizer)
        meeting.group.agree("sharded_state", _arguments(optimizer))
        states = _entries(model, meeting.rank)
        if meeting.rank > 0:
            names = _names_of_parameters(model)
            states = {name: value for name, value in states.items() if name in names}
        if optimizer is None:
            return {"model": states}
        common, parts = optimizer.split_state_dict()
        is_sharded = optimizer.model.ddp_config.use_distributed_optimizer
        params = _named_parameters(optimizer)
        for part in parts:
            entry = _part_of_tensor(part, params[part.name].numel(), 0 if is_sharded else meeting.rank)
            common["state"].setdefault(part.name, {})[part.key] = entry
        return {"model": states, "optimizer": common}


def load_sharded_state(
    folder: str | Path,
    model: torch.nn.Module,
    optimizer: DataParallelOptimizer | None = None,
    *,
    allow_cast: bool = False,
    group: Ranks = None,
) -> dict[str, Any]:
    """Collective over the ranks: loads what `sharded_state` has saved into a model and its optimizer.

    The number of ranks, the buckets and the sharding of the optimizer may differ from those that saved.

    Args:
        folder: folder of the checkpoint.
        model: model with the same names and shapes.
        optimizer: optimizer of the model. None for the model alone.
        allow_cast: True if tensors of the model, or those that torch's optimizer needs in another type, may be loaded
            into types that cannot hold all their values.
        group: the ranks; see `sharded_state`.

    Returns:
        All other plain values of the checkpoint, such as "step", and "optimizer" if no optimizer was given. `load`
        reads further `ShardedTensor`s.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message: the arguments are not allowed, or the
            checkpoint is damaged or does not fit the model or the optimizer. Nothing is loaded then, unless the
            module's own `load_state_dict` failed.
    """
    model = _uncompiled(model)
    with meet("load_sharded_state", _ranks_of(model, group)) as meeting:
        _check(model, optimizer)
        meeting.group.agree("load_sharded_state", _arguments(optimizer))
        opened = open_for_all(local_folder(folder), meeting)
        common = opened.load_common()
        entries = _entries(model, meeting.rank)
        stored = {name_in_module(key): key for key in opened.catalogue.tensors}
        stored |= {key: key for key in opened.catalogue.tensors}
        _check_keys(folder, {name_in_module(key) for key in stored}, common, entries)
        tensors = {name: one.without_data() for name, one in entries.items() if isinstance(one, ShardedTensor)}
        wanted: dict[str, Any] = {"model": tensors}
        if optimizer is not None:
            wanted["optimizer"] = {_PARTS: _wanted_parts(_saved_optimizer(common, folder), optimizer, meeting.rank)}
        # Without the check that the ranks want each element once: a rank wants what it needs.
        loaded: dict[str, Any] = load(
            wanted, folder, validate_access_integrity=False, allow_cast=allow_cast, rename=stored
        )
        if optimizer is not None:
            state = {"state": {}, **loaded["optimizer"]}  # without tensors it may be empty, and is not stored then
            optimizer.load_split_state_dict(state, state.pop(_PARTS, {}), allow_cast=allow_cast)
        own = {name_in_module(name): name for name in _inner(model).state_dict()}
        values = {name_in_module(name): value for name, value in loaded.get("model", {}).items()}
        _inner(model).load_state_dict({own.get(name, name): value for name, value in values.items()})
    loaded.pop("model", None)
    if optimizer is not None:
        del loaded["optimizer"]
    return loaded


def _check(model: torch.nn.Module, optimizer: DataParallelOptimizer | None) -> None:
    """Checks the arguments of both functions."""
    if not isinstance(model, torch.nn.Module):
        msg = f"model must be a module of torch, but is of {type(model).__name__}"
        raise ArgumentError(msg)
    if isinstance(model, DistributedDataParallel):
        model.check_unchanged()
    if optimizer is None:
        return
    if not isinstance(optimizer, DataParallelOptimizer):
        msg = (
            f"optimizer must be a DataParallelOptimizer, but is of {type(optimizer).__name__}; save the state of "
            'another as a plain value, {"optimizer": optimizer.state_dict()}'
        )
        raise ArgumentError(msg)
    if optimizer.model is not model:
        msg = "optimizer must be that of the model, but was made for another one"
        raise ArgumentError(msg)
    optimizer.model.check_attached(optimizer)
    if optimizer.model.expert_parallel_buffers:
        ranks, of_experts = optimizer.model.dense_collectives.size(), optimizer.model.expert_collectives.size()
        if ranks != of_experts:
            msg = (
                f"all ranks must have the same experts, but {of_experts} of {ranks} ranks share them: give the "
                "parameters of each rank a key of their own with ShardedTensor"
            )
            raise ArgumentError(msg)


def _arguments(optimizer: DataParallelOptimizer | None) -> str:
    """Text about the arguments that must be the same on all ranks."""
    return "called without an optimizer" if optimizer is None else "called with an optimizer"


def _ranks_of(model: torch.nn.Module, group: Ranks) -> Ranks:
    """The ranks that have the same model."""
    if group is not None:
        return group
    if isinstance(model, DistributedDataParallel):
        ranks: Ranks = model.dp_cp_group.group if isinstance(model.dp_cp_group, GroupOfRanks) else model.dp_cp_group
        return ranks
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


def _entries(model: torch.nn.Module, rank: int) -> dict[str, Any]:
    """The state of the model, with entries in the place of its tensors."""
    return {
        name: _whole_tensor(name, value, rank) if isinstance(value, torch.Tensor) else value
        for name, value in ((name_in_module(key), value) for key, value in _inner(model).state_dict().items())
    }


def _names_of_parameters(model: torch.nn.Module) -> set[str]:
    """Names of the parameters in the state of the model, each name of one that is used in several places."""
    inner = model.module if isinstance(model, DistributedDataParallel) else _inner(model)
    return {name_in_module(name) for name, _ in inner.named_parameters(remove_duplicate=False)}


def _named_parameters(optimizer: DataParallelOptimizer) -> dict[str, torch.nn.Parameter]:
    """Parameters of an optimizer's model, by their names in the module."""
    return {name_in_module(name): param for name, param in optimizer.model.module.named_parameters()}


def _whole_tensor(name: str, value: torch.Tensor, rank: int) -> ShardedTensor:
    """Entry of a tensor of the model, which all ranks have."""
    if is_part(value):
        msg = (
            f"{name} must be the same tensor on all ranks, but is a {type(value).__name__}, as FSDP's are: save it "
            "with torch.distributed.checkpoint, or describe its local part with trackbed.ShardedTensor"
        )
        raise ArgumentError(msg)
    shape = tuple(value.shape)
    return ShardedTensor(
        f"model.{name}", value.detach(), value.dtype, shape, shape, (0,) * len(shape), (1,) * len(shape), rank
    )


def _part_of_tensor(part: Part, numel: int, replica_id: int) -> ShardedTensor:
    """Entry of this rank's part of a tensor of the optimizer."""
    return _range_of(
        part.name, part.key, part.value.reshape(-1), part.value.dtype, part.span or (0, 0), numel, replica_id
    )


def _range_of(
    name: str,
    key: str,
    data: torch.Tensor | None,
    dtype: torch.dtype,
    span: tuple[int, int],
    numel: int,
    replica_id: int,
) -> ShardedTensor:
    start, stop = span
    return ShardedTensor(
        f"optimizer.state.{key}.{name}", data, dtype, (stop - start,), (numel,), (start,), None, replica_id
    )


def _saved_optimizer(common: Mapping[str, Any], folder: str | Path) -> Mapping[str, Any]:
    """State of the optimizer in the common state of a checkpoint."""
    saved = common.get("optimizer")
    if not isinstance(saved, Mapping) or not isinstance(saved.get("divided"), Mapping):
        found = f"of {type(saved).__name__}" if "optimizer" in common else "none"
        msg = (
            f"{folder}: must have a state of the optimizer that sharded_state saved, found {found}: read another with "
            "trackbed.load, and give it to load_full_state_dict"
        )
        raise CheckpointError(msg)
    return saved


def _wanted_parts(
    saved: Mapping[str, Any], optimizer: DataParallelOptimizer, rank: int
) -> dict[str, dict[str, ShardedTensor]]:
    """Entries of the tensors that this rank needs: ranges of those it updates, and all of those that are frozen."""
    params = _named_parameters(optimizer)
    trained, spans = set(optimizer.model.params_with_grad), optimizer.spans()
    is_sharded = optimizer.model.ddp_config.use_distributed_optimizer
    wanted: dict[str, dict[str, ShardedTensor]] = {}
    for saved_name, types in saved["divided"].items():
        name = name_in_module(saved_name)
        if name not in params or (params[name] in trained and name not in spans):
            continue
        if not isinstance(types, Mapping):
            msg = f"state of the optimizer: must have a dictionary for {name} under 'divided', found {types!r}"
            raise CheckpointError(msg)
        numel = params[name].numel()
        span = spans.get(name, (0, numel))
        replica_id = 0 if is_sharded and name in spans else rank
        wanted[name] = {
            key: _range_of(name, key, None, _type_of(dtype), span, numel, replica_id) for key, dtype in types.items()
        }
    return wanted


def _type_of(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        msg = f"state of the optimizer: must name types of torch under 'divided', found {name!r}"
        raise CheckpointError(msg)
    return found


def _check_keys(folder: str | Path, stored: set[str], common: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Checks that the checkpoint and the model have the same tensors and values.

    Args:
        folder: folder of the checkpoint, for errors.
        stored: keys of its tensors.
        common: its common state.
        entries: state of the model. Tensors without elements need not be stored.
    """
    own = {f"model.{name}" for name in entries}
    empty = {one.key for one in entries.values() if isinstance(one, ShardedTensor) and 0 in one.global_shape}
    others = common.get("model", {})
    found = {key for key in stored if key.startswith("model.")}
    if own - empty and not found:
        msg = (
            f"{folder}: must be a checkpoint of sharded_state, but has no model.* tensors: `trackbed ckpt ls` lists "
            "those that it has, and trackbed.open_checkpoint reads them"
        )
        raise CheckpointError(msg)
    found |= {f"model.{name_in_module(name)}" for name in others} if isinstance(others, Mapping) else set()
    if own - empty - found:
        msg = f"{folder}: must have every tensor of the model, but lacks {_first_of(own - empty - found)}"
        raise CheckpointError(msg)
    if found - own:
        msg = f"{folder}: the model must have every tensor of the checkpoint, but lacks {_first_of(found - own)}"
        raise CheckpointError(msg)


def _first_of(keys: set[str]) -> str:
    more = f" and {number_of(len(keys) - 1, 'other')}" if len(keys) > 1 else ""
    return min(keys) + more
