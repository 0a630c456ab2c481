"""Loads a checkpoint with all ranks."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any, overload

from trackbed.checkpoint.catalogue import Catalogue
from trackbed.checkpoint.describe import describe_request
from trackbed.checkpoint.exchange import Exchange, parse_exchange
from trackbed.checkpoint.folder import local_folder, open_for_all
from trackbed.checkpoint.loading import load_shards, require_loadable
from trackbed.checkpoint.mapping import ShardedObject, ShardedTensor
from trackbed.checkpoint.meeting import Ranks, meet
from trackbed.checkpoint.phases import Observer, Phases
from trackbed.checkpoint.same_keys import require_distinct
from trackbed.checkpoint.table import gather_table, has_elements, tabulate
from trackbed.checkpoint.validate import require_valid
from trackbed.errors import ArgumentError
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.later_calls import takes_later_calls
from trackbed.megatron.checkpoints.strategy_base import LoadCommonStrategy, LoadShardedStrategy
from trackbed.megatron.checkpoints.strictness import (
    StrictHandling,
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
)
from trackbed.plural import number_of

__all__ = ["load"]

logger = logging.getLogger(__name__)

Rename = Mapping[str, str] | Callable[[str], str]
Shard = ShardedTensor | ShardedObject


@overload
def load(
    folder: str | Path,
    /,
    *,
    group: Ranks = None,
    observe: Observer | None = None,
) -> dict[str, Any]: ...


@overload
def load(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002  Megatron Core's signature
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    rename: Rename | None = None,
    group: Ranks = None,
    exchange: Exchange = "auto",
    allow_cast: bool = False,
    observe: Observer | None = None,
) -> Any: ...


@takes_later_calls(6, ("verify_integrity", "process_group"), names={"process_group": "group"})
def load(
    sharded_state_dict: dict[str, Any] | str | Path,
    checkpoint_dir: str | Path | None = None,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002  Megatron Core's signature
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    rename: Rename | None = None,
    group: Ranks = None,
    exchange: Exchange = "auto",
    allow_cast: bool = False,
    observe: Observer | None = None,
) -> Any:
    """Collective over `group`: loads a checkpoint of Trackbed, Megatron Core or torch, in any layout.

    `load(folder)` returns the plain tensors and values of a checkpoint, and none of the tensors that `sharded_state`
    has saved: use `load_sharded_state`. `load(sharded_state_dict, folder)` returns them
    too, with the tensors and objects for which the argument has a `ShardedTensor` or `ShardedObject`. Plain tensors and
    values of the argument are ignored. In a checkpoint of `torch.distributed.checkpoint` everything is a tensor or an
    object to ask for; `open_checkpoint` reads it without a state.

    Args:
        sharded_state_dict: state with a `ShardedTensor` for each tensor and a `ShardedObject` for each object that is
            wanted. The `data` of a `ShardedTensor` is filled if it is not None. The dictionary is not changed. The
            folder, if only plain tensors and values are wanted.
        checkpoint_dir: folder of the checkpoint, if it is not the first argument.
        sharded_strategy: strategy that loads tensors and objects, in the place of this function's own way.
        common_strategy: strategy that loads the common state.
        validate_access_integrity: True to check that the main replicas of all ranks cover each tensor once, so that
            nothing is forgotten. False to load parts of tensors.
        strict: handling of unexpected keys, which are wanted and not stored, and of missing keys, which are stored and
            not wanted. "assume_ok_unexpected": an unexpected key is an error of the tensor that is not there.
            "log_unexpected", "log_all", "raise_unexpected", "raise_all": unexpected keys, or both kinds, are logged or
            raised. "return_unexpected", "return_all": they are returned. "ignore_all": they are left out.
        rename: mapping or function that gives the key under which a tensor is stored, for keys that have changed.
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.
        exchange: how tensors are read that several ranks want. "none": each rank reads them. "flat": one rank reads and
            sends them to the others. "auto": "none" if all ranks are on one host, otherwise "flat".
        allow_cast: True if tensors may be loaded into types that cannot hold all their values.
        observe: called with the name and the seconds of each phase.

    Returns:
        State with the loaded tensors and objects, and the plain tensors and values of the checkpoint. With `strict`
        "return_all" or "return_unexpected" a tuple of that, the missing keys, and the unexpected keys.

    Raises:
        ArgumentError: `exchange` is unknown, or a strategy is combined with what only this function's own way has.
        ValueError: `strict` is unknown.
        CheckpointError: on every rank, with the rank that failed and its message.
    """
    sharded_state_dict, checkpoint_dir = _state_and_folder(sharded_state_dict, checkpoint_dir)
    if sharded_strategy is not None or common_strategy is not None:
        if rename is not None or observe is not None:
            msg = "rename and observe: must be None where a strategy loads"
            raise ArgumentError(msg)
        return serialization.load(
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            common_strategy,
            validate_access_integrity,
            strict,
            process_group=group,
        )
    handling = parse_strict_flag(strict)
    parse_exchange(exchange)
    phases = Phases(observe)
    with meet("load", group) as meeting:
        with phases("open"):
            request = describe_request(sharded_state_dict)
            folder = open_for_all(local_folder(checkpoint_dir), meeting)
            shards = _renamed(request.shards, rename)
            table, _ = gather_table(meeting, tabulate(shards, meeting.rank))
            missing, unexpected = _differences(handling, folder.catalogue, shards, set(table.keys))
            if unexpected:
                is_kept = [shard.key not in unexpected for shard in shards]
                request = request.only(is_kept)
                shards = list(compress(shards, is_kept))
            for shard in shards:
                require_loadable(shard, folder.catalogue, allow_cast=allow_cast)
            if validate_access_integrity:
                require_distinct(shards, request.places, meeting.rank)
                require_valid(table, "load parts with validate_access_integrity=False")
            common = folder.load_common()
            if not shards and folder.catalogue.tensors and meeting.rank == 0:
                tensors = number_of(len(folder.catalogue.tensors), "sharded tensor")
                logger.warning("%s: none of its %s is asked for; open_checkpoint reads them, too", folder.path, tensors)
        with phases("read"), folder.naming_replacement():
            values = load_shards(shards, folder, meeting, exchange=exchange)
        with phases("merge"):
            loaded = request.fill(common, values)
    if StrictHandling.requires_returning_mismatch_keys(handling):
        return loaded, missing, unexpected
    return loaded


def _state_and_folder(
    state: dict[str, Any] | str | Path, folder: str | Path | None
) -> tuple[dict[str, Any], str | Path]:
    if isinstance(state, (str, Path)) and folder is None:
        return {}, state
    if isinstance(state, (str, Path)) or folder is None:
        msg = (
            "load: must be called as load(folder) or load(sharded_state_dict, folder), found arguments of "
            f"{type(state).__name__} and {type(folder).__name__}"
        )
        raise ArgumentError(msg)
    return state, folder


def _renamed(shards: Sequence[Shard], rename: Rename | None) -> list[Shard]:
    """The shards under their stored keys."""
    if rename is None:
        return list(shards)
    stored_key = rename if callable(rename) else lambda key: rename.get(key, key)
    return [replace(shard, key=stored_key(shard.key)) for shard in shards]


def _differences(
    handling: StrictHandling, catalogue: Catalogue, shards: Sequence[Shard], wanted: set[str]
) -> tuple[set[str], set[str]]:
    """Missing and unexpected keys, if they are to be handled.

    Args:
        handling: what to do about them.
        catalogue: contents of the checkpoint.
        shards: shards of this rank.
        wanted: keys of the shards of all ranks.

    Raises:
        CheckpointError: there are some, and that is to be an error.
    """
    if not StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
        return set(), set()
    stored = {*catalogue.tensors, *(ShardedObject.empty_from_any_key(name).key for name in catalogue.objects)}
    missing = stored - wanted if StrictHandling.requires_global_app_metadata(handling) else set()
    unexpected = {shard.key for shard in shards if has_elements(shard)} - stored
    if handling is not StrictHandling.IGNORE_ALL and not StrictHandling.requires_returning_mismatch_keys(handling):
        raises = handling in (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)
        maybe_report_missing_and_unexpected_keys(missing, unexpected, raises)
    return missing, unexpected
