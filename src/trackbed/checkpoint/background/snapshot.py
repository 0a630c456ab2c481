"""The two halves of a save in the background: what the caller waits for, and what a thread does afterwards."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trackbed.checkpoint.background.slab import Slab, places_of
from trackbed.checkpoint.folder import commit_checkpoint, data_name
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.checkpoint.plan.copies import check_copies_agree
from trackbed.checkpoint.ranks import Meeting, Phases, meet
from trackbed.checkpoint.save import SavePlan, make_partial, plan_save, write_descriptions, write_shards
from trackbed.checkpoint.state.plain_tensors import check_plain_tensors_agree, digesting
from trackbed.comm import Group
from trackbed.files.publish import write_new


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a rank writes in a save, as it was when the save began. Nothing of it is the program's any more."""

    plan: SavePlan
    values: list[torch.Tensor | bytes]
    """Copies of tensors in a slab, and bytes of objects."""
    contents: dict[str, bytes]
    """Small files by name; on ranks other than 0, nothing."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the rank writes."""
        return sum(value.nbytes if isinstance(value, torch.Tensor) else len(value) for value in self.values)


def reserve_for(state: dict[str, Any], slab: Slab, meeting: Meeting) -> None:
    """Collective over the ranks: makes the plan of a save, and takes the memory for its copies.

    Raises:
        CheckpointError: the state cannot be saved, or there is too little memory.
    """
    planned = plan_save(state, meeting, Phases(None))
    if meeting.rank == 0:
        planned.contents({})  # refuses values that could not be loaded
    slab.reserve(places_of(value.nbytes for value in planned.values if isinstance(value, torch.Tensor))[1])


def take_snapshot(
    state: dict[str, Any], slab: Slab, meeting: Meeting, phases: Phases, *, content: dict[str, Any]
) -> Snapshot:
    """Collective over the ranks: copies what this rank is to write of a state, which may change afterwards.

    Args:
        state: state as for `save`.
        slab: memory for the copies.
        meeting: the ranks.
        phases: times the phases.
        content: further plain values.

    Raises:
        CheckpointError: the state cannot be saved, or there is too little memory.
    """
    planned = plan_save(state, meeting, phases)
    with digesting(planned.compared if meeting.size > 1 else {}, meeting.poll) as plain_tensors:
        check_copies_agree(meeting, planned.described.divided, planned.plan.divided)
        with phases("copy"):
            values = slab.copies_of(planned.values, meeting.poll)
        with phases("encode"):
            contents = planned.contents(content) if meeting.rank == 0 else {}
        if meeting.size > 1:
            own_tensors = plain_tensors()
            digests = meeting.group.all_gather(own_tensors.digest().hex())
            check_plain_tensors_agree(
                meeting, own_tensors, [bytes.fromhex(digest) for digest in digests], planned.plan.divided.paths
            )
    return Snapshot(planned.plan, values, contents)


WriteFile = Callable[[Path, Sequence[torch.Tensor | bytes], str, Callable[[], None]], WrittenFiles]
"""Writes values to the file of a name in a folder, and calls a function again and again, which may raise."""


def write_snapshot(
    snapshot: Snapshot,
    folder: Path,
    group: Group,
    phases: Phases,
    *,
    write: WriteFile,
    commit: Callable[[Path, Path], None] = commit_checkpoint,
) -> None:
    """Collective over the ranks: writes a snapshot as a checkpoint, which appears whole or not at all.

    Args:
        snapshot: snapshot of this rank.
        folder: folder of the checkpoint.
        group: the ranks. Tables go through files, so that it works after `destroy_process_group`, too.
        phases: times the phases.
        write: writes the file of this rank.
        commit: called on rank 0 to give a whole partial folder the name of the checkpoint.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message.
    """
    with meet("save", group) as meeting:
        with phases("write"):
            partial = make_partial(folder, meeting)
            written = write(partial, snapshot.values, data_name(meeting.rank), meeting.poll)
        with phases("collect"):
            written_by_rank = _collect_in(partial, meeting, written)
        with phases("commit"):
            if meeting.rank == 0:
                write_descriptions(partial, snapshot.plan, written_by_rank, snapshot.contents)
                commit(partial, folder)


def write_in_thread(*, direct: bool) -> WriteFile:
    """Returns a function that writes on the thread that calls it.

    Args:
        direct: True to write past the page cache where the file system allows it.
    """

    def write(
        folder: Path, values: Sequence[torch.Tensor | bytes], name: str, poll: Callable[[], None]
    ) -> WrittenFiles:
        return write_shards(folder, values, [name] * len(values), poll, direct=direct, in_place=True)

    return write


def _collect_in(folder: Path, meeting: Meeting, written: WrittenFiles) -> Sequence[WrittenFiles]:
    """Collective over the ranks: tells rank 0, through files, what each has written."""
    if meeting.size == 1:
        return [written]
    names = [f"written.{rank}" for rank in range(meeting.size)]
    if meeting.rank > 0:
        write_new(folder / names[meeting.rank], written.encode())
    meeting.group.barrier()
    if meeting.rank > 0:
        return []
    found = [written, *(WrittenFiles.decode((folder / name).read_bytes()) for name in names[1:])]
    for name in names[1:]:
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
    return found
