"""Saves checkpoints of a run while training goes on, and finds them again."""

import contextlib
import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from trackbed.checkpoint.background.snapshot import Snapshot
from trackbed.checkpoint.begin_save import AnySave
from trackbed.checkpoint.damage import find_damage
from trackbed.checkpoint.format.extents import Described
from trackbed.checkpoint.load import load
from trackbed.checkpoint.ranks import Meeting, Observer, Phases, Ranks, meet
from trackbed.checkpointer.filled import filled
from trackbed.checkpointer.groups import groups_of
from trackbed.checkpointer.mirror import Mirror
from trackbed.checkpointer.one_caller import OneCaller
from trackbed.checkpointer.open_checkpointers import add_open, discard_open
from trackbed.checkpointer.options import (
    check_alike,
    check_number,
    check_pattern,
    check_step,
    check_word,
    checked_seconds,
    mirror_run,
)
from trackbed.checkpointer.places import Places
from trackbed.checkpointer.records import SaveRecord
from trackbed.checkpointer.removal import Removal
from trackbed.checkpointer.runs import AnyRun, LocalRun, run_in
from trackbed.checkpointer.signals import SignalAgreement, check_signals
from trackbed.checkpointer.steps import DEFAULT_PATTERN, Keep, Retention, StepNames
from trackbed.checkpointer.writer import BackgroundSave, BackgroundWriter, WriterKind
from trackbed.comm.rendezvous import Stopped, cause_of
from trackbed.comm.store import StoreUnreachable
from trackbed.comm.torch_group import check_initialized
from trackbed.errors import ArgumentError, CheckpointError
from trackbed.files.stores import is_address
from trackbed.optim import load_sharded_state

logger = logging.getLogger(__name__)

OnBusy = Literal["wait", "skip", "error"]
OnFailure = Literal["raise", "warn"]
SnapshotKind = Literal["copied", "deferred"]
_SAVE, _LOAD = "save", "load"
"""First items of what ranks exchange: a rank at another operation sends something else."""


class Checkpointer:
    """Collective over `group`: keeps the checkpoints of a run in a folder. A context manager.

    A save copies what each rank is to write, and returns; a thread writes the copies while training goes on. A
    checkpoint appears whole or not at all. One save is in flight at a time.

    Example, on every rank:

        with Checkpointer("checkpoints", keep_last=3) as checkpointer:
            for step in range(first, last):
                ...
                if step % 1000 == 0:
                    checkpointer.save(step, sharded_state(model, optimizer))

    Args:
        folder: folder of the checkpoints, which is made if it is not there, or an address of an object store. One job
            at a time may keep it.
        keep_last: number of the newest checkpoints to keep, at least 1; None for all.
        keep_every: steps that it divides are kept, too; None for none.
        keep: further steps to keep, or a function that is true for them.
        on_busy: what `save` does while the save before is in flight. "wait" for its end; "skip" to save nothing;
            "error" to raise.
        on_failure: what becomes of the failure of a save. "raise" it from the next `poll`, `wait`, `save` or `close`;
            "warn" to log it.
        writer: "thread" to write on a thread of the program; "process" for a process beside each rank, which takes
            200 MB of memory and leaves Python's lock to the program. It ends with the program.
        snapshot: "copied" if `save` returns once everything is copied; "deferred" if the thread may copy parameters and
            states of optimizers later, before the next step of any optimizer. Optimizers count that have made a step
            before. Anything else that changes these goes into `with checkpointer.lock()`.
        max_bytes: most bytes of memory for the copies of this rank, which are taken in units of 2 MiB; None for as many
            as they take. `save` waits until the rest is written, and `history` says how long. Plain values, and plain
            tensors that are stored with them, are serialised besides.
        mirror: second place of the checkpoints, a folder or an address of an object store: a thread copies committed
            ones there, the newest first. What the first place has lost is loaded from there. None for none.
        mirror_every: steps that it divides are copied to the mirror; None for all.
        mirror_keep_last: number of the newest checkpoints to keep in the mirror; None for all.
        pattern: name of the folder of a step.
        group: the ranks, as a `comm.Group` or a process group of torch; by default those of `torch.distributed`, or
            this process alone.
        direct: True to write past the page cache where the file system allows it.
        observe: called with the name and the seconds of each phase, on the thread that writes, too.

    Raises:
        ArgumentError: this process is one of several, and `torch.distributed` was not initialised.
        CheckpointError: on every rank: an argument is out of range, or not the same on all ranks; or another job keeps
            checkpoints in the folder, where the file system has locks.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep: Keep = (),
        on_busy: OnBusy = "wait",
        on_failure: OnFailure = "raise",
        writer: WriterKind = "thread",
        snapshot: SnapshotKind = "copied",
        max_bytes: int | None = None,
        mirror: str | Path | None = None,
        mirror_every: int | None = None,
        mirror_keep_last: int | None = None,
        pattern: str = DEFAULT_PATTERN,
        group: Ranks = None,
        direct: bool = True,
        observe: Observer | None = None,
    ) -> None:
        if group is None:
            check_initialized("Checkpointer")
        # The ranks meet before they make groups, which a rank that has failed would never enter.
        with meet("Checkpointer", group) as meeting:
            numbers = {"keep_last": keep_last, "keep_every": keep_every, "max_bytes": max_bytes}
            numbers |= {"mirror_every": mirror_every, "mirror_keep_last": mirror_keep_last}
            for name, number in numbers.items():
                check_number(name, number)
            check_word("on_busy", on_busy, ("wait", "skip", "error"))
            check_word("on_failure", on_failure, ("raise", "warn"))
            check_word("writer", writer, ("thread", "process"))
            check_word("snapshot", snapshot, ("copied", "deferred"))
            self._run = run_in(folder)
            self._names = StepNames(pattern)
            check_pattern(self._run, self._names)
            second = None if mirror is None else mirror_run(self._run, mirror)
            if second is not None:
                check_pattern(second, self._names)
            if second is None and (mirror_every is not None or mirror_keep_last is not None):
                raise ArgumentError("mirror: must be given for mirror_every and mirror_keep_last, but is None")
            if observe is not None and not callable(observe):
                raise ArgumentError(f"observe: must be a function of a name and seconds, found {observe!r}")
            self._removal = Removal(self._run, self._names, Retention(keep_last, keep_every, keep))
            options = {"folder": str(self._run), "on_busy": on_busy, "on_failure": on_failure, "writer": writer}
            options |= {"snapshot": snapshot, "mirror": str(second), "pattern": pattern}
            check_alike(meeting, {**options, **numbers, "max_bytes": None})
        self._on_busy, self._on_failure = on_busy, on_failure
        self._observe = observe
        self._calls, threads = groups_of(group)
        self._threads, self._rank = threads, threads.rank
        self._mirror: Mirror | None = None
        if second is not None and isinstance(self._run, LocalRun):
            kept = Retention(mirror_keep_last, keep_every, keep)
            self._mirror = Mirror(self._run, second, threads, self._names, every=mirror_every, retention=kept)
        self._places = Places(self._run, self._mirror, self._names)
        with contextlib.ExitStack() as undone:
            with meet("Checkpointer", self._calls) as meeting:
                if meeting.rank == 0:
                    self._run.take(self._names)
                    undone.callback(self._run.release)
                    if self._mirror is not None:
                        self._mirror.take()
                        undone.callback(self._mirror.run.release)
                self._writer = BackgroundWriter(
                    threads, kind=writer, direct=direct, max_bytes=max_bytes, defers=snapshot == "deferred"
                )
                undone.callback(self._writer.end)
            undone.pop_all()
        self._is_told = False
        """True once the log says that `save` waits for what does not fit into `max_bytes`."""
        self._is_closed = False
        self._use = OneCaller(repr(self))
        # A checkpointer that is dropped without `close` must not keep the folder from the next one.
        weakref.finalize(self, _release, os.getpid(), self._run, self._mirror).atexit = False
        self._signals: SignalAgreement | None = None
        self._loaded: list[int] | None = None
        """Step that was loaded, until the first save after it is whole."""
        self.history: list[SaveRecord] = []
        """Saves of this process, in order."""
        add_open(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if error is None:
                raise
            logger.exception("the last save has failed")

    def __repr__(self) -> str:
        """Says where the checkpoints are."""
        return f"<Checkpointer of {self._run}>"

    def path(self, step: int) -> Path | str:
        """Folder of the checkpoint of a step, which need not be there; an address where checkpoints are in a store.

        It is that in the mirror where the first place has none.
        """
        return self._places.path(step)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, in rising order."""
        return self._places.steps()

    def latest(self, *, verified: bool = False) -> int | None:
        """Highest step of which there is a checkpoint; None if there is none.

        Args:
            verified: True for the highest step whose checkpoint is whole. This is collective over the ranks, which
                share the reading of every byte, and return the same step. Those that are passed over are logged; if
                none is whole, the next commit sets them aside.

        Raises:
            CheckpointError: with `verified`, on every rank: a rank has failed, or nothing is whole, and the mirror
                cannot be read.
            StoreError: without `verified`: the folder has none, and the mirror cannot be read.
        """
        if not verified:
            found = self.steps() or self._places.steps_of_reachable_mirror()
            return found[-1] if found else None
        passed_over = False
        with self._use("latest"), meet("latest", self._calls) as meeting:
            for step in reversed(meeting.group.broadcast(self.steps() if meeting.rank == 0 else [])):
                places = [str(place) for place in self._places.of_step(step)] if meeting.rank == 0 else []
                for place in meeting.group.broadcast(places):
                    with self._removal.using(step):
                        share = meeting.rank, meeting.size
                        problem = next(find_damage(place, lambda _: meeting.poll(), share=share), None)
                        problems = [one for one in meeting.group.all_gather(problem) if one is not None]
                    if not problems:
                        self._places.note_whole(step, place if is_address(place) else Path(place))
                        return int(step)
                    passed_over = True
                    if meeting.rank == 0:
                        logger.warning("%s: is passed over, because it is not whole: %s", place, problems[0])
            if meeting.rank == 0:
                self._places.steps_of_reachable_mirror()  # an error, where it cannot say that it has none
        if passed_over:
            self._loaded = [-1]  # the run begins anew, and what is damaged must not count as the newest
        return None

    def prepare(self, state: dict[str, Any]) -> None:
        """Collective over the ranks: makes the plan of saves of such a state, and takes the memory for its copies.

        The first save of such a state is as fast as later ones then. States of optimizers are made by their first step,
        so call it after that, or after a load.

        Args:
            state: state as for `save`.

        Raises:
            CheckpointError: on every rank: the state cannot be saved, or there is too little memory.
        """
        with self._use("prepare"), meet("prepare", self._calls) as meeting:
            self._check_open()
            self._wait_in(meeting)
            self._writer.prepare(state, meeting)

    def save(self, step: int, state: dict[str, Any], *, content_metadata: dict[str, Any] | None = None) -> bool:
        """Collective over the ranks: begins to save a state, which the program may change once this returns.

        Args:
            step: step of the state, at least 0, which names the folder. A checkpoint of the step is replaced.
            state: state as for `trackbed.save`.
            content_metadata: description of the contents, as for `trackbed.save`.

        Returns:
            True for a save in flight; False if it is left out, because the one before is in flight.

        Raises:
            CheckpointError: on every rank, with the rank that failed and its message: the state cannot be saved, the
                step is no number from 0 on, or not the same on all ranks, or the save before has failed.
        """
        with self._use("save"):
            return self._save(step, state, content_metadata)

    def _save(self, step: int, state: dict[str, Any], content_metadata: dict[str, Any] | None) -> bool:
        start = time.perf_counter()
        record = SaveRecord(step)
        phases = Phases(self._observer_of(record))
        content = {} if content_metadata is None else {"content_metadata": content_metadata}
        snapshot = self._take(step, state, phases, content)
        if snapshot is None:
            return False
        record.num_bytes = snapshot.num_bytes
        record.blocked_seconds = time.perf_counter() - start
        number = len(self.history)
        self.history.append(record)
        loaded = self._loaded  # a load while this save is in flight counts for the next one

        def end(error: BaseException | None) -> None:
            record.error = None if error is None else str(error)
            record.total_seconds = time.perf_counter() - start
            self._removal.remove_hidden()
            if error is None:
                self._places.note_saved(step)
                if self._mirror is not None:
                    self._mirror.committed(record, number)

        def commit(save: AnySave, described: Described) -> None:
            self._commit(save, described, step, loaded)

        self._writer.begin(BackgroundSave(snapshot, self._run.folder_of(self._names.name(step)), phases, commit, end))
        if snapshot.live:
            record.blocked_seconds = time.perf_counter() - start
            record.num_live_bytes = snapshot.num_live_bytes
            self._tell_of_live(record)
        return True

    def _take(self, step: int, state: dict[str, Any], phases: Phases, content: dict[str, Any]) -> Snapshot | None:
        """Collective over the ranks: takes a snapshot; None if the save is left out."""
        snapshot = None
        try:
            with meet("save", self._calls) as meeting:
                self._check_open()
                check_step(step)
                self._removal.try_keep(step)  # what `keep` raises is raised here, and not behind training
                if self._may_begin(step, meeting):
                    snapshot = self._writer.take(state, meeting, phases, content)
        except BaseException:
            if snapshot is not None:  # another rank has failed: steps of optimizers must not wait for copies
                snapshot.abandon()
            raise
        return snapshot

    def _tell_of_live(self, record: SaveRecord) -> None:
        """Says once that memory is too small for all copies."""
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "the save of step %d has kept the program waiting for %.2f s: %s of %s bytes do not fit into "
                "max_bytes, and were written before it returned",
                record.step,
                record.blocked_seconds,
                f"{record.num_live_bytes:,}",
                f"{record.num_bytes:,}",
            )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Runs the block while nothing of the program's memory is copied. Not collective.

        With `snapshot="deferred"`, changes of parameters and of states of optimizers that no step of an optimizer
        makes belong into it.
        """
        if not self._use.is_forked:
            self._writer.wait_for_copies()
        yield

    def poll(self, step: int | None = None) -> bool:
        """Looks whether the save in flight has ended, and whether a signal asks for one, without waiting.

        Not collective. It waits only while the threads of all ranks agree on the step after a signal.

        Args:
            step: step that the program has made. Needed after `save_on_signal`.

        Returns:
            True if the program is to save now, and to end if it wants: after a signal to any rank, at one step, the
            same on all ranks. `received_signal` has the signal.

        Raises:
            ArgumentError: the step is missing.
            CheckpointError: the save has failed, on any rank.
        """
        self._use.check("poll")
        self._conclude()
        for problem in [] if self._mirror is None else self._mirror.problems():
            logger.warning("%s", problem)
        if self._signals is None:
            return False
        if step is None:
            raise ArgumentError("poll: must get the step after save_on_signal, but got none")
        return self._signals.is_due(step)

    def save_on_signal(self, *signals: int) -> None:
        """Collective over the ranks: has `poll` be true once after a signal to any rank.

        The program calls `poll` after each step, on all ranks. The signals do nothing else then; their handlers are
        restored by `close`.

        Args:
            signals: signals, such as `signal.SIGTERM` and `signal.SIGUSR1`.

        Raises:
            ArgumentError: this is not the main thread, or it was called before.
        """
        if self._signals is not None:
            raise ArgumentError("save_on_signal: must be called once, but was called before")
        with self._use("save_on_signal"), meet("save_on_signal", self._calls):
            self._check_open()
            check_signals(signals)
        self._signals = SignalAgreement(self._threads.child("signals"), signals)

    @property
    def received_signal(self) -> signal.Signals | None:
        """Signal for which `poll` was last true; None if it never was."""
        return None if self._signals is None else self._signals.received

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Waits for the end of the save in flight, if there is one. Not collective.

        Args:
            timeout_seconds: longest time to wait; None for as long as it takes.

        Raises:
            CheckpointError: it has failed, on any rank, or is still in flight.
        """
        self._use.check("wait")
        deadline = math.inf if timeout_seconds is None else time.monotonic() + checked_seconds(timeout_seconds)
        while self._writer.is_busy:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the save of step {self.history[-1].step}: must have ended within {timeout_seconds:g} s, but is "
                    "in flight: wait again"
                )
            self._writer.sleep()
        self._conclude()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Waits for the end of the save in flight, and gives the memory back. No save may follow.

        Args:
            timeout_seconds: longest time to wait; None for as long as it takes.

        Raises:
            CheckpointError: it has failed, on any rank. Or it is still in flight: then nothing is closed.
        """
        if self._is_closed or self._use.is_forked:
            return
        self._use.check("close")
        deadline = math.inf if timeout_seconds is None else time.monotonic() + checked_seconds(timeout_seconds)
        try:
            self.wait(timeout_seconds)
        finally:
            if not self._writer.is_busy:
                if self._mirror is not None and not self._mirror.finish(lambda: time.monotonic() > deadline):
                    raise CheckpointError(
                        f"{self._mirror.run}: the copy to the mirror must have ended within {timeout_seconds:g} s, but "
                        "is in flight: close again"
                    )
                self._end()

    def _end(self) -> None:
        """Gives back what the checkpointer has."""
        if self._mirror is not None:
            self._mirror.close()
            for problem in self._mirror.problems():
                logger.warning("%s", problem)
        self._is_closed = True
        self._run.release()
        self._writer.end()
        if self._signals is not None:
            self._signals.close()
        discard_open(self, self._signals)

    def load(self, state: dict[str, Any], step: int | None = None) -> dict[str, Any] | None:
        """Collective over the ranks: loads a checkpoint; see `trackbed.load`.

        Plain tensors of the state are filled, too, where they have the shape of the stored ones.

        Args:
            state: state as for `trackbed.load`.
            step: step of the checkpoint, the same on all ranks; None for the latest one.

        Returns:
            The loaded state. None if no step is given and there is no checkpoint.

        Raises:
            CheckpointError: on every rank, with the rank that failed and its message.
        """
        with self._loading_step(step) as found:
            if found is None:
                return None
            loaded: dict[str, Any] = filled(state, load(state, found, group=self._calls))
            return loaded

    def load_sharded_state(self, model: Any, optimizer: Any = None, step: int | None = None) -> dict[str, Any] | None:
        """Collective over the ranks: loads a checkpoint into a model and its optimizer.

        Args:
            model: see `trackbed.load_sharded_state`.
            optimizer: see there.
            step: step of the checkpoint, the same on all ranks; None for the latest one.

        Returns:
            Further plain values of the checkpoint. None if no step is given and there is no checkpoint.

        Raises:
            CheckpointError: on every rank, with the rank that failed and its message.
        """
        with self._loading_step(step) as found:
            if found is None:
                return None
            return load_sharded_state(found, model, optimizer, group=self._calls)

    @contextlib.contextmanager
    def _loading_step(self, step: int | None) -> Iterator[Path | str | None]:
        """Collective over the ranks: yields the folder of the step to load, which is not removed meanwhile."""
        with self._use("load"), self._agreed_step(step) as found:
            yield found

    @contextlib.contextmanager
    def _agreed_step(self, step: int | None) -> Iterator[Path | str | None]:
        found: list[Any] = [step, None, None]
        self._writer.wait_for_copies()
        try:
            with meet("load", self._calls) as meeting:
                self._check_open()
                if step is not None:
                    check_step(step)
                if meeting.rank == 0:
                    found[1] = self._removal.use(self.latest if step is None else lambda: step)
                    found[2] = None if found[1] is None else os.fspath(self.path(found[1]))
                offered = meeting.group.broadcast([_LOAD, *found])
                if not isinstance(offered, list) or offered[:1] != [_LOAD]:
                    raise CheckpointError("all ranks must load at the same time, but rank 0 is at another operation")
                found[:] = offered[1:]
                if found[0] != step:
                    raise CheckpointError(
                        f"step: must be the same on all ranks, but is {step} here and {found[0]} on rank 0"
                    )
            yield found[2]
        finally:
            self._removal.release(found[1])
        self._loaded = None if found[1] is None else [found[1]]
        if step is None and self._loaded is not None and self._writer.is_busy:
            # The newest was wanted: the save in flight is no later branch.
            self._loaded = [max(found[1], self.history[-1].step)]

    def _may_begin(self, step: int, meeting: Meeting) -> bool:
        """Collective over the ranks: agrees on whether a save begins, after the end of the one before."""
        of_ranks = meeting.group.all_gather([_SAVE, step, self._writer.is_busy])
        for rank, found in enumerate(of_ranks):
            if not isinstance(found, list) or found[:1] != [_SAVE]:
                raise CheckpointError(f"all ranks must save at the same time, but rank {rank} is at another operation")
            other = found[1]
            if other != step:
                raise CheckpointError(
                    f"step: must be the same on all ranks, but is {step} here and {other} on rank {rank}"
                )
        if any(busy for _, _, busy in of_ranks) and self._on_busy != "wait":
            if self._on_busy == "error":
                raise CheckpointError(
                    f"step {step}: must be saved after the end of the save before, which is in flight"
                )
            return False
        self._wait_in(meeting)
        return True

    def _wait_in(self, meeting: Meeting) -> None:
        """Waits for the end of the save in flight, and looks for failures of other ranks meanwhile."""
        while self._writer.is_busy:
            meeting.poll()
            self._writer.sleep()
        self._conclude()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(f"{self._run}: its Checkpointer must be open, but was closed")

    def _conclude(self) -> None:
        """Reports the end of a save, if there is one that has ended."""
        error = self._writer.outcome()
        if error is None:
            return
        self.history[-1].error = str(error)
        text = f"the save of step {self.history[-1].step} has failed: {error}"
        if self._on_failure == "warn":
            logger.warning("%s", text)
            return
        # An error that ended the save here because of another rank would end the caller's meeting in the same way.
        is_own = cause_of(error, Stopped) is None and cause_of(error, StoreUnreachable) is None
        raise CheckpointError(text) from (error if is_own else None)

    def _commit(self, save: AnySave, described: Described, step: int, loaded: list[int] | None) -> None:
        """Makes a save the checkpoint of a step, on rank 0.

        After an older step was loaded, later ones are set aside first, so that `latest` is on the new branch.
        """
        if loaded is not None and self._mirror is not None:
            self._mirror.rewind(loaded[0])
        later = (
            [] if loaded is None else [one for one in self._run.steps(self._names) if one > loaded[0] and one != step]
        )
        aside = self._run.commit(save, described, [self._run.folder_of(self._names.name(one)) for one in later])
        if self._loaded is loaded:
            self._loaded = None
        if aside and loaded is not None:
            logger.warning(
                "%s, so later checkpoints have other names now: %s",
                f"step {loaded[0]} was loaded" if loaded[0] >= 0 else "no checkpoint was whole",
                ", ".join(map(str, aside)),
            )
        # Before the other ranks hear of the commit, so that all find the same steps.
        self._removal.hide_old({step, *(() if self._mirror is None else self._mirror.needed_steps)})

    def _observer_of(self, record: SaveRecord) -> Observer:
        def observe(name: str, seconds: float) -> None:
            record.phases[name] = seconds
            if self._observe is None:
                return
            self._use.thread = threading.get_ident()
            try:
                self._observe(name, seconds)
            except Exception:  # which is no reason to lose a checkpoint
                logger.exception("observe must raise nothing, but has, for the phase %r", name)
            finally:
                self._use.thread = None

        return observe


def _release(process: int, run: AnyRun, mirror: Mirror | None) -> None:
    """Lets other jobs keep the folders."""
    if os.getpid() == process:
        run.release()
        if mirror is not None:
            mirror.run.release()
