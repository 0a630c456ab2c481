"""The two halves of a save in the background: what the caller waits for, and what a thread does afterwards."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import torch

from trackbed.checkpoint.background.copies import LaterCopies
from trackbed.checkpoint.background.slab import Slab, padded
from trackbed.checkpoint.begin_save import AnySave, begin_save, collect_in
from trackbed.checkpoint.format.extents import Described
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.io.targets import Target
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.checkpoint.plan.copies import check_copies_agree
from trackbed.checkpoint.ranks import Meeting, Phases, meet
from trackbed.checkpoint.save import SavePlan, descriptions, plan_save
from trackbed.checkpoint.state.plain_tensors import check_plain_tensors_agree, digesting
from trackbed.comm import Group
from trackbed.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Values that a rank writes in a save, as they were when the save began."""

    plan: SavePlan
    live: list[torch.Tensor | bytes]
    """Values that there is no memory for copies of: the program waits until they are written."""
    values: list[torch.Tensor | bytes]
    """The other values, behind these: copies of tensors in a slab, and bytes of objects."""
    contents: dict[str, bytes]
    """Small files by name; on ranks other than 0, nothing."""
    later: LaterCopies | None = None
    """Copies that are still to be made."""
    is_own: Event = field(default_factory=Event)
    """Set once nothing but what `later` copies is the program's any more, or the save has failed."""
    is_given_up: Event = field(default_factory=Event)
    """Set by a program that does not wait any more."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the rank writes, without plain values."""
        return sum(map(_size_of, self.live + self.values))

    @property
    def num_live_bytes(self) -> int:
        """Bytes of the values that were not copied."""
        return sum(map(_size_of, self.live))

    def check_awaited(self) -> None:
        """Checks that the program still waits for values that were not copied.

        Raises:
            CheckpointError: it does not, and may change them.
        """
        if self.is_given_up.is_set():
            raise CheckpointError("the program was interrupted while it waited for values that were not copied")

    def abandon(self) -> None:
        """Makes no copies, where the save will not begin."""
        if self.later is not None:
            self.later.abandon()

    def end(self) -> None:
        """Ends all waits of the program."""
        if self.later is not None:
            self.later.end()
        self.is_own.set()


def reserve_for(state: dict[str, Any], slab: Slab, meeting: Meeting, *, max_bytes: int | None) -> None:
    """Collective over the ranks: makes the plan of a save, and takes the memory for its copies.

    Args:
        state: state as for `save`.
        slab: memory for the copies.
        meeting: the ranks.
        max_bytes: most bytes of memory; None for as many as it takes.

    Raises:
        CheckpointError: the state cannot be saved, or there is too little memory.
    """
    planned = plan_save(state, meeting, Phases(None))
    if meeting.rank == 0:
        planned.contents({})  # refuses values that could not be loaded
    copied = planned.values[num_live(map(_size_in_slab, planned.values), max_bytes) :]
    slab.reserve_for(copied)


def num_live(sizes: Iterable[int], max_bytes: int | None) -> int:
    """Number of the first values that have no place in memory of some size. Pure.

    >>> num_live([100, 100, 100], 130), num_live([100, 100, 100], 127)
    (2, 3)
    """
    sizes = list(sizes)
    if max_bytes is None:
        return 0
    ends = itertools.accumulate(map(padded, reversed(sizes)))
    return len(sizes) - sum(1 for end in ends if end <= max_bytes)


def take_snapshot(
    state: dict[str, Any],
    slab: Slab,
    meeting: Meeting,
    phases: Phases,
    *,
    content: dict[str, Any],
    max_bytes: int | None = None,
    defers: bool = False,
) -> Snapshot:
    """Collective over the ranks: copies what this rank is to write of a state, which may change afterwards.

    Args:
        state: state as for `save`.
        slab: memory for the copies.
        meeting: the ranks.
        phases: times the phases.
        content: further plain values.
        max_bytes: most bytes of memory; None for as many as it takes. What does not fit is not copied.
        defers: True to leave copies of parameters and states of optimizers for later.

    Raises:
        CheckpointError: the state cannot be saved, or there is too little memory.
    """
    planned = plan_save(state, meeting, phases)
    count = num_live(map(_size_in_slab, planned.values), max_bytes)
    later = LaterCopies() if defers else None
    try:
        with digesting(planned.compared if meeting.size > 1 else {}, meeting.poll) as plain_tensors:
            check_copies_agree(meeting, planned.described.divided, planned.plan.divided)
            with phases("copy"):
                values = slab.copies_of(planned.values[count:], meeting.poll, later)
            with phases("encode"):
                contents = planned.contents(content) if meeting.rank == 0 else {}
            if meeting.size > 1:
                own_tensors = plain_tensors()
                digests = meeting.group.all_gather(own_tensors.digest().hex())
                check_plain_tensors_agree(
                    meeting, own_tensors, [bytes.fromhex(digest) for digest in digests], planned.plan.divided.paths
                )
    except BaseException:
        if later is not None:
            later.abandon()
        raise
    return Snapshot(planned.plan, planned.values[:count], values, contents, later)


Write = Callable[[Target, Sequence[torch.Tensor | bytes], Callable[[], None]], WrittenFiles]
"""Writes values to where a rank writes, and calls a function again and again, which may raise."""


Commit = Callable[[AnySave, Described], None]
"""Makes a save the checkpoint, with its small files."""


def write_snapshot(
    snapshot: Snapshot,
    folder: AnyFolder,
    group: Group,
    phases: Phases,
    *,
    write_live: Write,
    write: Write,
    commit: Commit,
) -> None:
    """Collective over the ranks: writes a snapshot as a checkpoint, which appears whole or not at all.

    Args:
        snapshot: snapshot of this rank.
        folder: folder of the checkpoint.
        group: the ranks. Tables go through files, so that it works after `destroy_process_group`, too.
        phases: times the phases.
        write_live: writes values that were not copied.
        write: writes copies.
        commit: called on rank 0 to make the save the checkpoint, with its small files and all files.

    Raises:
        CheckpointError: on every rank, with the rank that failed and its message.
    """
    with meet("save", group) as meeting:
        if snapshot.later is not None:
            with phases("copy later"):
                snapshot.later.make(meeting.poll)
        with phases("write"):
            save = begin_save(folder, meeting)
            written = []
            if snapshot.live:

                def poll_awaited() -> None:
                    snapshot.check_awaited()
                    meeting.poll()

                written.append(write_live(save.target(meeting.rank, 1), snapshot.live, poll_awaited))
                snapshot.check_awaited()
            snapshot.is_own.set()
            if snapshot.values or not written:
                num_files = sum(len(one.files) for one in written)
                written.append(write(save.target(meeting.rank, 0, num_files=num_files), snapshot.values, meeting.poll))
        if snapshot.later is not None:
            snapshot.later.check()
        with phases("collect"):
            written_by_rank = collect_in(save, meeting, WrittenFiles.join(written))
        with phases("commit"):
            if meeting.rank == 0:
                commit(save, descriptions(snapshot.plan, written_by_rank, snapshot.contents, save))


def write_in_thread(*, direct: bool) -> Write:
    """Returns a function that writes on the thread that calls it.

    Args:
        direct: True to write past the page cache where the file system allows it.
    """

    def write(target: Target, values: Sequence[torch.Tensor | bytes], poll: Callable[[], None]) -> WrittenFiles:
        return target.write(values, poll, direct=direct, in_place=True)

    return write


def _size_of(value: torch.Tensor | bytes) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else len(value)


def _size_in_slab(value: torch.Tensor | bytes) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0
