"""Saves a checkpoint with all ranks."""

from pathlib import Path
from typing import Any

from trackbed.checkpoint.folder import COMMON_NAME, commit_checkpoint, data_name, target_folder
from trackbed.checkpoint.format.config_file import CONFIG_NAME, CheckpointingConfig
from trackbed.checkpoint.format.safe_pickle import torch_bytes
from trackbed.checkpoint.other_arguments import refuses_megatron_arguments
from trackbed.checkpoint.phases import Observer, Phases
from trackbed.checkpoint.plan.assignment import plan_balanced
from trackbed.checkpoint.plan.same_keys import require_distinct
from trackbed.checkpoint.plan.table import is_written
from trackbed.checkpoint.ranks import Meeting, Ranks, meet
from trackbed.checkpoint.state.describe import describe_state
from trackbed.checkpoint.state.partial_tensors import check_whole, check_whole_shards
from trackbed.checkpoint.state.plain_tensors import check_same, digesting
from trackbed.checkpoint.state.tree import nested_items_iter
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
from trackbed.errors import CheckpointError

__all__ = ["save"]


@refuses_megatron_arguments({"sharded_state_dict": "state", "checkpoint_dir": "folder"})
def save(
    state: dict[str, Any],
    folder: str | Path,
    *,
    content_metadata: dict[str, Any] | None = None,
    group: Ranks = None,
    direct: bool = True,
    observe: Observer | None = None,
) -> None:
    """Collective over `group`: saves a state dictionary as a checkpoint, which appears whole or not at all.

    In a folder with files of other programs, which are kept, the files of the checkpoint appear one after the other.

    `save({**sharded_state(model, optimizer), "step": 100}, "checkpoints/step-0000100")`, on every rank.

    Ranks that have copies of the same shard divide the writing among themselves. The state dictionary is not changed.

    Args:
        state: dictionary with a `ShardedTensor` for each tensor that all ranks write, a `ShardedObject` for each object
            of one rank, and plain tensors and values, which rank 0 writes. The main replicas of all ranks must cover
            each tensor once. Plain values come back equal and of their class, or are refused with their place. Plain
            tensors of 64 KiB or more must be the same on all ranks that have them, and `DTensor`s are refused.
        folder: folder of the checkpoint, neither a link nor the working directory. An earlier checkpoint there is
            replaced, where the file system can exchange two folders.
        content_metadata: description of the contents, which `load` returns under the key "content_metadata".
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.
        direct: True to write past the page cache where the file system allows it.
        observe: called with the name and the seconds of each phase.

    Raises:
        ArgumentError: an argument is Megatron Core's, which `trackbed.megatron.save` takes, or this process is one of
            several and `torch.distributed` was not initialised.
        CheckpointError: on every rank, with the rank that failed and its message. The folder is as it was before.
    """
    if group is None:
        check_initialized("save")
    with meet("save", group) as meeting:
        content = {} if content_metadata is None else {"content_metadata": content_metadata}
        _save(state, target_folder(folder), meeting, Phases(observe), content=content, direct=direct)


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
    content: dict[str, Any],
    direct: bool,
) -> None:
    with phases("describe"):
        described = describe_state(state)
        check_whole(described.common)
        check_whole_shards(described.shards)
        if meeting.size > 1:
            _check_of_all_ranks(described.common)
    with phases("plan"):
        require_distinct(described.shards, described.places, meeting.rank)
        shards = list(filter(is_written, described.shards))
        objects = encode_objects(shards)
        plan = agree_on_plan(meeting, shards, objects, plan_balanced, validates=True)
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
            config = CheckpointingConfig("torch_dist", 1)
            contents = {
                COMMON_NAME: torch_bytes(described.common_with(content), COMMON_NAME),
                CONFIG_NAME: config.encode(),
            }
            write_descriptions(partial, plan, found, contents)
            commit_checkpoint(partial, folder)
