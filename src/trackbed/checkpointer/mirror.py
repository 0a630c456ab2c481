"""A second place of the checkpoints of a run, to which committed ones are copied behind the training loop."""

import itertools
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final

from trackbed.checkpoint.background.priority import lower_priority
from trackbed.checkpoint.begin_save import AnySave
from trackbed.checkpoint.copy_checkpoint import copy_checkpoint
from trackbed.checkpoint.format.extents import Described
from trackbed.checkpoint.ranks import Meeting, meet
from trackbed.checkpointer.records import SaveRecord
from trackbed.checkpointer.runs import AnyRun, LocalRun
from trackbed.checkpointer.steps import Retention, StepNames
from trackbed.comm import Group
from trackbed.daemon_threads import DaemonThreads
from trackbed.errors import StoreError, TrackbedError
from trackbed.files.stores.time_limit import at_most

logger = logging.getLogger(__name__)

_SHORT_SECONDS: Final = 5.0
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 300.0
_LOOK_SECONDS: Final = 0.05
REWOUND_NAME: Final = ".mirror.rewound"
"""File in the first folder with a step behind which the mirror has checkpoints of another branch."""


class Mirror:
    """Copies committed checkpoints to a second place, the newest first, one at a time.

    The threads of all ranks meet for each committed checkpoint, under the number of its save. Rank 0 says then what is
    copied: the newest that the mirror lacks. So a mirror that falls behind skips to the newest. After a failure they
    meet again, after longer and longer pauses, until the copy is there or a newer checkpoint is committed.

    Args:
        source: the first place.
        run: the second one.
        group: the ranks; their threads meet in children of this group.
        names: names of the folders of steps.
        every: steps that it divides are copied; None for all.
        retention: which checkpoints are kept in the second place.
    """

    def __init__(
        self,
        source: LocalRun,
        run: AnyRun,
        group: Group,
        names: StepNames,
        *,
        every: int | None,
        retention: Retention,
    ) -> None:
        self.run = run
        """The second place."""
        self._source, self._group, self._names = source, group, names
        self._every, self._retention = every, retention
        self._thread = DaemonThreads("trackbed mirror")
        self._thread.submit(lower_priority)
        self._last: Future[None] | None = None
        self._newest: SaveRecord | None = None
        self._number = -1
        """Number of the newest save."""
        self._abandoned = -1
        """Number of the last save of a branch that the run has left, on rank 0: it and those before are not copied."""
        self._copied: int | None = None
        """Step that is being copied, on rank 0."""
        self._branch: int | None = None
        """Step behind which that copy sets checkpoints of the mirror aside; None for none."""
        self._is_taken = False
        self._is_ending = False
        """True while the end of the copies is waited for, which are not tried again and again then."""
        self._failed_at_end = -1
        """Number of the last save whose copy has failed then."""
        self._outdated: dict[int, int] = {}
        """Numbers of the last saves of steps of which the mirror has nothing, or what an earlier save has written."""
        self._problems: list[str] = []
        self._lock = Lock()

    def take(self) -> None:
        """Takes the second place, on rank 0. If it cannot be reached, the first copy tries again.

        Raises:
            CheckpointError: another job keeps checkpoints there.
        """
        try:
            with at_most(_SHORT_SECONDS):
                self._take()
        except (StoreError, OSError) as error:
            logger.warning(
                "%s: the mirror must be reachable, and is tried with the first copy, but: %s", self.run, error
            )

    def _take(self) -> None:
        if not self._is_taken:
            self.run.take(self._names)
            self._is_taken = True

    def committed(self, record: SaveRecord, number: int) -> None:
        """Has the newest checkpoint copied. Called on all ranks, after each commit.

        Args:
            record: the save.
            number: its number, the same on all ranks.
        """
        with self._lock:
            self._outdated[record.step] = number
        if not self._every or record.step % self._every == 0:
            with self._lock:
                self._newest, self._number = record, number
            self._last = self._thread.submit(partial(self._copy, number, record))

    @property
    def needed_steps(self) -> set[int]:
        """Steps that must not be removed from the first place, on rank 0: they are being copied, or are to be."""
        with self._lock:
            newest = self._newest
            needed = {self._copied, None if newest is None or newest.mirrored_seconds is not None else newest.step}
        return {step for step in needed if step is not None}

    def problems(self) -> list[str]:
        """Texts about copies that have failed, once."""
        with self._lock:
            found, self._problems = self._problems, []
        return found

    def steps(self) -> list[int]:
        """Steps of the checkpoints in the second place that belong to the branch of the run, in rising order.

        Raises:
            OSError: the folder cannot be read.
            StoreError: the store refuses, or does not answer in time.
        """
        rewound = self._rewound()
        return [step for step in self.run.steps(self._names) if not self._is_left(step, rewound)]

    def _is_left(self, step: int, rewound: int | None) -> bool:
        """True if the mirror's checkpoint of a step is of another branch, or another save has taken its place."""
        return step in self._outdated or (rewound is not None and step > rewound)

    def finish(self, is_over: Callable[[], bool]) -> bool:
        """Waits for the copies, and tries once more where the last one has failed. Returns False if one is in flight.

        Args:
            is_over: true once it must not wait any longer.
        """
        self._is_ending = True
        told = time.monotonic() + _SHORT_SECONDS
        while self._last is not None and not self._last.done():
            if is_over():
                self._is_ending, self._failed_at_end = False, -1
                return False
            if time.monotonic() > told:
                logger.warning("%s: the copy of a checkpoint to the mirror is waited for", self.run)
                told = math.inf
            time.sleep(0.02)
        return True

    def close(self) -> None:
        """Ends the thread, and lets another job keep checkpoints in the second place."""
        self._thread.end()
        self.run.release()

    def _copy(self, number: int, record: SaveRecord) -> None:
        """Collective over the threads of the ranks: copies a checkpoint, unless there is a newer one."""
        for attempt in itertools.count():
            if self._try(number, record, attempt):
                return

    def _try(self, number: int, record: SaveRecord, attempt: int) -> bool:
        """Makes an attempt. Returns True, on all ranks, if none follows."""
        is_wanted, is_last, start = False, True, time.perf_counter()
        try:
            # A group of its own for each meeting: one that has failed is not used again.
            with meet("mirror", self._group.child(f"mirror {number}.{attempt}")) as meeting:
                found = self._choose(number, record, attempt, meeting) if meeting.rank == 0 else None
                is_wanted, is_last = meeting.group.broadcast(found)
                start = time.perf_counter()
                if is_wanted:
                    self._copy_step(record.step, meeting)
        except (TrackbedError, OSError, RuntimeError) as error:  # training goes on
            if self._is_ending and is_last:  # one that was in flight when the wait began is followed by another
                self._failed_at_end = number
            self._note_problem(record, str(error))
            return bool(is_last)
        finally:
            self._copied = None
        if is_wanted:
            with self._lock:
                self._outdated = {step: last for step, last in self._outdated.items() if last > number}
            record.mirror_error, record.mirrored_seconds = None, time.perf_counter() - start
            if self._group.rank == 0:
                self._remove_old(record.step)
        return True

    def _choose(self, number: int, record: SaveRecord, attempt: int, meeting: Meeting) -> tuple[bool, bool]:
        """Chooses, on rank 0, whether a checkpoint is copied, after a pause behind an attempt that has failed.

        Returns:
            True to copy it; and whether no further attempt follows if this one fails.
        """
        pause = min(_FIRST_PAUSE * 2 ** min(attempt - 1, 20), _LONGEST_PAUSE) if attempt else 0.0
        deadline = time.monotonic() + pause
        while time.monotonic() < deadline and not self._is_ending and self._number == number:
            meeting.poll()
            time.sleep(_LOOK_SECONDS)
        with self._lock:
            # The threads meet under the number of the newer one, or have tried while the end was waited for.
            if self._number > number or number <= max(self._abandoned, self._failed_at_end):
                return False, True
            self._copied, self._branch = record.step, self._rewound()
            return True, self._is_ending

    def _note_problem(self, record: SaveRecord, text: str) -> None:
        with self._lock:
            record.mirror_error = text
            self._problems.append(f"{self.run}: step {record.step} must be copied to the mirror, but: {text}")

    def _copy_step(self, step: int, meeting: Meeting) -> None:
        name = self._names.name(step)
        if meeting.rank == 0:
            self._take()
        rewound = self._branch if meeting.rank == 0 else None

        def commit(save: AnySave, described: Described) -> None:
            steps = [one for one in self.run.steps(self._names) if one != step and self._is_left(one, rewound)]
            self.run.commit(save, described, [self.run.folder_of(self._names.name(one)) for one in steps])
            self._forget_rewind(rewound)

        copy_checkpoint(self._source.folder_of(name), self.run.folder_of(name), meeting, commit)

    def _remove_old(self, newest: int) -> None:
        """Removes the checkpoints of the mirror that are not to be kept."""
        try:
            for step in self._retention.steps_to_remove(self.run.steps(self._names), {newest}):
                self.run.hide(self._names.name(step))()
        except (OSError, TrackbedError) as error:
            logger.warning("%s: earlier checkpoints must be removed, but: %s", self.run, error)

    # After an older step was loaded, the mirror has checkpoints of the branch that was left until the next copy sets
    # them aside. A file says so, also to the next job.

    @property
    def _note(self) -> Path:
        return self._source.path(REWOUND_NAME)

    def rewind(self, step: int) -> None:
        """Notes, before the commit of a new branch, the step from which the run has gone on."""
        with self._lock:
            self._abandoned = self._number
            found = self._rewound()
            try:
                self._note.write_text(str(step if found is None else min(found, step)))
            except OSError as error:
                logger.warning("%s: must be written, but: %s", self._note, error)

    def _rewound(self) -> int | None:
        try:
            return int(self._note.read_text())
        except (OSError, ValueError):
            return None

    def _forget_rewind(self, rewound: int | None) -> None:
        if rewound is not None and rewound == self._rewound():
            self._note.unlink(missing_ok=True)
