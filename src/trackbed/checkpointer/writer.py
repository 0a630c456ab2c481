"""Snapshots of one rank, and the thread that writes them, one after the other."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch

from trackbed.checkpoint.background.copies import watch_optimizers
from trackbed.checkpoint.background.priority import lower_priority
from trackbed.checkpoint.background.slab import Slab
from trackbed.checkpoint.background.snapshot import (
    Commit,
    Snapshot,
    Write,
    reserve_for,
    take_snapshot,
    write_in_thread,
    write_snapshot,
)
from trackbed.checkpoint.background.writer_process import WriterProcess
from trackbed.checkpoint.begin_save import AnySave
from trackbed.checkpoint.format.extents import Described
from trackbed.checkpoint.io.file_reader import AnyFolder
from trackbed.checkpoint.io.targets import Target
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.checkpoint.ranks import Meeting, Phases
from trackbed.checkpointer.signs_of_life import SignsOfLife
from trackbed.comm import Group
from trackbed.daemon_threads import DaemonThreads
from trackbed.errors import CheckpointError

WriterKind = Literal["thread", "process"]
_POLL_SECONDS: Final = 0.02
_SILENT_TIMEOUTS: Final = 1.2
"""Timeouts of the group without a sign of life after which the thread hangs."""


@dataclass(frozen=True, slots=True)
class BackgroundSave:
    """A snapshot, and what becomes of it."""

    snapshot: Snapshot
    folder: AnyFolder
    """Folder of the checkpoint."""
    phases: Phases
    """Times the phases."""
    commit: Commit
    """Called on the thread of rank 0, to make the save the checkpoint."""
    end: Callable[[BaseException | None], None]
    """Called on the thread, with the error, or None for a checkpoint that is whole."""


class BackgroundWriter:
    """Takes snapshots into memory that it keeps, and writes them on a thread. One save is in flight at a time.

    Args:
        group: the ranks; their threads meet in children of this group.
        kind: "process" to have files written by a process beside this one.
        direct: True to write past the page cache where the file system allows it.
        max_bytes: most bytes of memory for copies; None for as many as they take.
        defers: True to leave copies of parameters and states of optimizers to the thread.
    """

    def __init__(self, group: Group, *, kind: WriterKind, direct: bool, max_bytes: int | None, defers: bool) -> None:
        self._threads = group
        self._group, self._num_groups = group.child("writers 0"), 1
        self._is_broken = False
        """True after a failure, which the group may not outlive."""
        self._max_bytes, self._defers = max_bytes, defers
        if defers:
            watch_optimizers()
        self._slab = Slab()
        self.process = WriterProcess(group.timeout_seconds) if kind == "process" else None
        self._write_in_thread = write_in_thread(direct=direct)
        self._direct = direct
        if self.process is not None:
            self.process.start()
        self._signs = SignsOfLife(_SILENT_TIMEOUTS * group.timeout_seconds)
        self._thread = _new_thread()
        self._pending: Future[None] | None = None
        self._snapshot: Snapshot | None = None

    @property
    def is_busy(self) -> bool:
        """True while a save is in flight, unless its thread hangs."""
        return self._pending is not None and not self._pending.done() and self._signs.problem() is None

    def sleep(self) -> None:
        """Waits a moment, or until the save in flight has ended."""
        _sleep_until(self._pending)

    def prepare(self, state: dict[str, Any], meeting: Meeting) -> None:
        """Collective over the ranks: makes the plan of saves of a state, and takes the memory for its copies."""
        reserve_for(state, self._slab, meeting, max_bytes=self._max_bytes)
        if self.process is not None:
            self.process.wait_until_ready(meeting.poll)

    def take(self, state: dict[str, Any], meeting: Meeting, phases: Phases, content: dict[str, Any]) -> Snapshot:
        """Collective over the ranks: takes a snapshot of a state, after the end of the save before.

        Args:
            state: state as for `trackbed.save`.
            meeting: the ranks.
            phases: times the phases.
            content: further plain values.

        Raises:
            CheckpointError: the state cannot be saved, or there is too little memory.
        """
        # After a failure on any rank their threads meet in a new group.
        numbers = meeting.group.all_gather(self._num_groups + int(self._is_broken))
        if max(numbers) > self._num_groups:
            self._num_groups = max(numbers)
            self._group = self._threads.child(f"writers {self._num_groups}")
        self._is_broken = False
        return take_snapshot(
            state, self._slab, meeting, phases, content=content, max_bytes=self._max_bytes, defers=self._defers
        )

    def begin(self, save: BackgroundSave) -> None:
        """Begins to write a snapshot, the result of `take`. Waits for the values of it that were not copied."""
        snapshot = self._snapshot = save.snapshot
        self._pending = self._thread.submit(partial(self._write, save))
        try:
            while snapshot.live and self.is_busy and not snapshot.is_own.wait(_POLL_SECONDS):
                pass
        except BaseException:
            snapshot.is_given_up.set()  # the program may change what is not written
            raise

    def wait_for_copies(self) -> None:
        """Waits until nothing of the program's memory is used."""
        if self._snapshot is not None and self._snapshot.later is not None:
            self._snapshot.later.wait()

    def outcome(self) -> BaseException | None:
        """Error of the save that has ended, once; None if there is none."""
        if self._pending is None or self.is_busy:
            return None
        pending, self._pending = self._pending, None
        if pending.done():
            error = pending.exception()
        else:
            error = CheckpointError(f"{self._signs.problem()}, and its memory is not used again")
            self._signs.give_up()
            if self._snapshot is not None:
                self._snapshot.end()
            self._slab, self._thread = Slab(), _new_thread()
            self._signs = SignsOfLife(_SILENT_TIMEOUTS * self._threads.timeout_seconds)
        self._is_broken = error is not None
        self._snapshot = None
        return error

    def end(self) -> None:
        """Ends the thread, after the save in flight, and gives the memory back."""
        # The thread must not refer to the last copies: torch's memory cannot be freed while the program ends.
        ended = self._thread.submit(lambda: None)
        while not ended.done() and self._signs.problem() is None:
            _sleep_until(ended)
        self._thread.end()
        self._slab.release()
        if self.process is not None:
            self.process.end()

    def _write(self, save: BackgroundSave) -> None:
        """Writes a snapshot, on the thread."""
        signs, slab = self._signs, self._slab

        def write_copies(
            target: Target, values: Sequence[torch.Tensor | bytes], poll: Callable[[], None]
        ) -> WrittenFiles:
            if self.process is None:
                return self._write_in_thread(target, values, poll)
            return self.process.write(target, values, slab, poll, direct=self._direct)

        def commit(begun: AnySave, described: Described) -> None:
            with signs.working(f"commit {begun.folder}"):
                save.commit(begun, described)

        error: BaseException | None = None
        try:
            write_snapshot(
                save.snapshot,
                save.folder,
                self._group,
                save.phases,
                write_live=_with_signs(self._write_in_thread, signs),
                write=_with_signs(write_copies, signs),
                commit=commit,
            )
        except BaseException as found:
            error = found
            raise
        finally:
            save.snapshot.end()
            save.end(error)


def _new_thread() -> DaemonThreads:
    thread = DaemonThreads("trackbed checkpoints")
    thread.submit(lower_priority)
    return thread


def _with_signs(write: Write, signs: SignsOfLife) -> Write:
    """Returns a function that writes, and gives signs of life."""

    def write_and_live(
        target: Target, values: Sequence[torch.Tensor | bytes], poll: Callable[[], None]
    ) -> WrittenFiles:
        with signs.working(f"write {target}", poll) as live:
            return write(target, values, live)

    return write_and_live


def _sleep_until(pending: "Future[None] | None") -> None:
    if pending is not None:
        with contextlib.suppress(TimeoutError):
            pending.exception(_POLL_SECONDS)
