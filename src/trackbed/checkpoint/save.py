"""Saves a checkpoint with all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trackbed.checkpoint.config_file import CONFIG_NAME, CheckpointingConfig
from trackbed.checkpoint.describe import describe_state
from trackbed.checkpoint.folder import COMMON_NAME, commit_checkpoint, data_name, target_folder
from trackbed.checkpoint.meeting import Meeting, Ranks, meet
from trackbed.checkpoint.parts import check_whole, check_whole_shards
from trackbed.checkpoint.phases import Observer, Phases
from trackbed.checkpoint.plain_tensors import check_same, digesting
from trackbed.checkpoint.plan_save import plan_balanced
from trackbed.checkpoint.safe_pickle import torch_bytes
from trackbed.checkpoint.same_keys import require_distinct
from trackbed.checkpoint.table import is_written
from trackbed.checkpoint.tree import nested_items_iter
from trackbed.checkpoint.writing import (
    agree_on_plan,
    collect_beside,
    encode_objects,
    make_partial,
    shard_values,
    write_descriptions,
    write_shards,
)
from trackbed.comm.torch import check_initialized
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.megatron.checkpoints import serialization
from trackbed.megatron.checkpoints.async_requests import AsyncRequest
from trackbed.megatron.checkpoints.entries import clean_metadata
from trackbed.megatron.checkpoints.later_calls import takes_later_calls
from trackbed.megatron.checkpoints.strategy_base import SaveCommonStrategy, SaveShardedStrategy
from trackbed.megatron.checkpoints.strictness import log_common_differences

__all__ = ["save"]


@takes_later_calls(8, ("async_strategy", "verify_integrity"))
def save(
    sharded_state_dict: dict[str, Any],
    checkpoint_dir: str | Path,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,  # noqa: FBT001, FBT002  Megatron Core's signature
    async_sharded_save: bool = False,  # noqa: FBT001, FBT002
    preprocess_common_before_consistancy_check: Callable[[Any], Any] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    group: Ranks = None,
    direct: bool = True,
    observe: Observer | None = None,
) -> AsyncRequest | None:
    """Collective over `group`: saves a state dictionary as a checkpoint, which appears whole or not at all.

    In a folder with files of other programs, which are kept, the files of the checkpoint appear one after the other.

    `save({**sharded_state(model, optimizer), "step": 100}, "checkpoints/step-0000100")`, on every rank. A new program
    needs the state and the folder only; the arguments after them are Megatron Core's.

    Ranks that have copies of the same shard divide the writing among themselves. The state dictionary is not changed.

    Args:
        sharded_state_dict: dictionary with a `ShardedTensor` for each tensor that all ranks write, a `ShardedObject`
            for each object of one rank, and plain tensors and values, which rank 0 writes. Plain values come back equal
            and of their class, or are refused with their place. Plain tensors of 64 KiB or more must be the same on all
            ranks that have them, and `DTensor`s are refused.
        checkpoint_dir: folder of the checkpoint, neither a link nor the working directory. An earlier checkpoint there
            is replaced, where the file system can exchange two folders.
        sharded_strategy: strategy that saves tensors and objects, in the place of this function's own way.
        common_strategy: None, or the strategy for the common state, which makes no difference.
        validate_access_integrity: True to check that the main replicas of all ranks cover each tensor once; False to
            save parts of tensors. What a rank has must be in a main replica of some rank in any case.
        async_sharded_save: True to return a request that makes the save when it is executed, with the values that the
            tensors have then.
        preprocess_common_before_consistancy_check: returns the part of the common state that all ranks should share;
            differences are logged. By default none is compared.
        content_metadata: description of the contents; `dp_cp_group` is left out.
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.
        direct: True to write past the page cache where the file system allows it.
        observe: called with the name and the seconds of each phase.

    Returns:
        A request if `async_sharded_save`, else None.

    Raises:
        ArgumentError: a strategy is combined with an argument that only this function's own way has, or this process is
            one of several and `torch.distributed` was not initialised.
        CheckpointError: on every rank, with the rank that failed and its message. The folder is as it was before.
    """
    if sharded_strategy is not None or common_strategy is not None:
        if group is not None or observe is not None:
            msg = "group and observe: must be None where a strategy saves"
            raise ArgumentError(msg)
        return serialization.save(
            sharded_state_dict,
            checkpoint_dir,
            sharded_strategy,
            common_strategy,
            validate_access_integrity,
            async_sharded_save,
            preprocess_common_before_consistancy_check,
            content_metadata,
        )

    if group is None:
        check_initialized("save")

    def write() -> None:
        with meet("save", group) as meeting:
            _save(
                sharded_state_dict,
                target_folder(checkpoint_dir),
                meeting,
                Phases(observe),
                validates=validate_access_integrity,
                shared_part=preprocess_common_before_consistancy_check,
                content_metadata=content_metadata,
                direct=direct,
            )

    if async_sharded_save:
        checkpoint_dir = Path(checkpoint_dir).absolute()  # the program may change its working directory meanwhile
        return AsyncRequest(write, (), [])
    write()
    return None


def _check_of_all_ranks(common: dict[str, Any]) -> None:
    """Checks that no plain value says that it is of one rank alone.

    Raises:
        CheckpointError: one does.
    """
    for _, key, value in nested_items_iter(common):
        if key == "of_rank":
            msg = (
                "plain values must be the same on all ranks, as those of rank 0 are saved, but a state has of_rank = "
                f"{value}: save that of an optimizer with sharded_state(model, optimizer), or as its full_state_dict()"
            )
            raise CheckpointError(msg)


def _save(
    state: dict[str, Any],
    folder: Path,
    meeting: Meeting,
    phases: Phases,
    *,
    validates: bool,
    shared_part: Callable[[Any], Any] | None,
    content_metadata: dict[str, Any] | None,
    direct: bool,
) -> None:
    with phases("describe"):
        described = describe_state(state)
        check_whole(described.common)
        check_whole_shards(described.shards)
        if meeting.size > 1:
            _check_of_all_ranks(described.common)
        if validates and shared_part is not None:
            log_common_differences(shared_part(dict(described.common)), meeting)
    with phases("plan"):
        if validates:
            require_distinct(described.shards, described.places, meeting.rank)
        shards = list(filter(is_written, described.shards))
        objects = encode_objects(shards)
        plan = agree_on_plan(meeting, shards, objects, plan_balanced, validates=validates)
    partial = make_partial(folder, meeting)
    with digesting(described.common if meeting.size > 1 else {}, meeting.poll) as plain_tensors:
        with phases("write"):
            values = shard_values(shards, objects, plan, meeting.rank)
            names = [data_name(meeting.rank)] * len(values)
            written = write_shards(partial, values, names, meeting.poll, direct=direct)
        with phases("collect"):
            own = plain_tensors()
            found, digests = collect_beside(meeting, written, own.digest())
            check_same(meeting, own, digests)
    with phases("commit"):
        if meeting.rank == 0:
            content = {} if content_metadata is None else {"content_metadata": clean_metadata(content_metadata)}
            config = CheckpointingConfig("torch_dist", 1)
            contents = {
                COMMON_NAME: torch_bytes(described.common_with(content), COMMON_NAME),
                CONFIG_NAME: config.encode(),
            }
            write_descriptions(partial, plan, found, contents)
            commit_checkpoint(partial, folder)
