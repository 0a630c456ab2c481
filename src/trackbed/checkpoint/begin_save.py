"""Begins a save with all ranks, into a folder of a file system or of an object store."""

import os
from pathlib import Path
from typing import Final, TypeAlias
from uuid import uuid4

from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.io.stored_folder import StoredFolder
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.checkpoint.local_save import LocalSave
from trackbed.checkpoint.ranks import Meeting
from trackbed.checkpoint.stored_save import StoredSave, begin_stored_save
from trackbed.errors import CheckpointError
from trackbed.files.publish_folder import make_partial_folder

AnySave: TypeAlias = LocalSave | StoredSave
"""A save that is being written."""

_SAVE: Final = "save"
"""First item of what rank 0 sends: a rank at another operation sends something else."""


def begin_save(folder: AnyFolder, meeting: Meeting) -> AnySave:
    """Collective over the ranks: makes a place for the files of a checkpoint. It is removed if the meeting fails.

    Args:
        folder: folder that is to be the checkpoint.
        meeting: the ranks.

    Raises:
        CheckpointError: this rank saves to another folder than rank 0, or does not see the partial one.
        StoreError: a store refuses, does not answer in time, or has no conditional writes.
    """
    save_id = uuid4().hex
    if isinstance(folder, StoredFolder):
        return _begin_in_store(folder, meeting, save_id)
    path = make_partial(folder, meeting)
    return LocalSave(path, folder, save_id)


def _begin_in_store(folder: StoredFolder, meeting: Meeting, save_id: str) -> StoredSave:
    offer = None
    if meeting.rank == 0:
        save = begin_stored_save(folder, save_id)
        meeting.undo.append(save.give_up)
        offer = [_SAVE, folder.address, save_id]
    offered = meeting.group.broadcast(offer)
    if not isinstance(offered, list) or offered[:1] != [_SAVE]:
        raise CheckpointError("all ranks must save at the same time, but rank 0 is at another operation")
    _, address, save_id = offered
    if address != folder.address:
        raise CheckpointError(
            f"folder: must be the same on all ranks, but rank {meeting.rank} saves to {folder}, and rank 0 to {address}"
        )
    return StoredSave(folder, save_id)


def make_partial(folder: Path, meeting: Meeting) -> Path:
    """Collective over the ranks: creates a partial folder beside the one that a checkpoint is to have.

    It is removed if the meeting fails.

    Raises:
        CheckpointError: this rank saves to another folder than rank 0, or does not see the partial one.
    """
    final = folder.absolute()
    offer = None
    if meeting.rank == 0:
        final.parent.mkdir(parents=True, exist_ok=True)
        path = make_partial_folder(final, may_replace=lambda found: found.is_dir())
        meeting.remove_after_error(path)
        offer = [_SAVE, os.fsencode(path).hex(), os.fsencode(os.path.realpath(final)).hex()]
    offered = meeting.group.broadcast(offer)
    if not isinstance(offered, list) or offered[:1] != [_SAVE]:
        raise CheckpointError("all ranks must save at the same time, but rank 0 is at another operation")
    unfinished, real = (Path(os.fsdecode(bytes.fromhex(text))) for text in offered[1:])
    if Path(os.path.realpath(final)) != real:
        raise CheckpointError(
            f"folder: must be the same on all ranks, but rank {meeting.rank} saves to {final}, and rank 0 to {real}"
        )
    if not unfinished.is_dir():
        raise CheckpointError(
            f"{unfinished}: must be a folder on a file system that all ranks share, but this rank does not see it"
        )
    return unfinished


def collect_in(save: AnySave, meeting: Meeting, written: WrittenFiles) -> list[WrittenFiles]:
    """Collective over the ranks: tells rank 0, through files, what each has written.

    Args:
        save: the save.
        meeting: the ranks, which need no group of torch.
        written: files of this rank.

    Returns:
        Files of each rank, in rank order; on ranks other than 0, nothing.
    """
    if meeting.size == 1:
        return [written]
    names = [f"written.{rank}" for rank in range(meeting.size)]
    if meeting.rank > 0:
        save.put(names[meeting.rank], written.encode())
    meeting.group.barrier()
    if meeting.rank > 0:
        return []
    return [written, *(WrittenFiles.decode(save.take(name)) for name in names[1:])]
