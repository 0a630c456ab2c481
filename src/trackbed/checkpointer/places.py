"""The places of checkpoints: the first one, and the mirror."""

import logging
import math
import time
from pathlib import Path

from trackbed.checkpointer.mirror import Mirror
from trackbed.checkpointer.runs import AnyRun
from trackbed.checkpointer.steps import StepNames
from trackbed.errors import StoreError
from trackbed.files.stores.time_limit import at_most

_SHORT_SECONDS = 5.0
_PAUSE_SECONDS = 30.0
logger = logging.getLogger(__name__)


class Places:
    """The places of the checkpoints of a run.

    Args:
        run: the first place.
        mirror: the second one; None if there is none.
        names: names of the folders of steps.
    """

    def __init__(self, run: AnyRun, mirror: Mirror | None, names: StepNames) -> None:
        self._run, self._mirror, self._names = run, mirror, names
        self._asks_again = -math.inf
        """Time of `time.monotonic` from which on the mirror is asked."""
        self._whole: dict[int, Path | str] = {}
        """Place in which the checkpoint of a step is known to be whole, where it is not in the first one."""

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint in either place, in rising order.

        Raises:
            OSError: a folder cannot be read.
            StoreError: the first place does not answer in time.
        """
        return sorted({*self._run.steps(self._names), *self._steps_of_mirror()})

    def of_step(self, step: int) -> list[Path | str]:
        """Places that have a checkpoint of a step, the first one first."""
        if self._mirror is None:
            return [self.first(step)]
        found = [self.first(step)] if step in self._run.steps(self._names) else []
        if step in self._steps_of_mirror():
            found.append(self._mirror.run.path(self._names.name(step)))
        return found

    def path(self, step: int) -> Path | str:
        """Place of the checkpoint of a step; the first one if there is no checkpoint."""
        if self._mirror is None:
            return self.first(step)
        if step in self._whole:
            return self._whole[step]
        if step in self._run.steps(self._names):
            return self.first(step)  # without a question to the mirror, which may be down
        return next(iter(self.of_step(step)), self.first(step))

    def first(self, step: int) -> Path | str:
        """The checkpoint of a step in the first place, which need not be there."""
        return self._run.path(self._names.name(step))

    def note_whole(self, step: int, place: Path | str) -> None:
        """Notes where the checkpoint of a step is whole."""
        self._whole.pop(step, None)
        if place != self.first(step):
            self._whole[step] = place
            logger.warning("step %d is read from the mirror: %s", step, place)

    def note_saved(self, step: int) -> None:
        """Notes that the first place has a new checkpoint of a step."""
        self._whole.pop(step, None)

    def steps_of_reachable_mirror(self) -> list[int]:
        """Steps in the mirror, which must be readable: a run whose first place is lost must not begin anew.

        Raises:
            OSError: it cannot be read.
            StoreError: it does not answer in time.
        """
        if self._mirror is None:
            return []
        try:
            return self._mirror.steps()
        except StoreError as error:
            raise StoreError(
                f"{self._run}: has no checkpoint that can be used, so the mirror must be readable, as the run must not "
                f"begin anew where it has one: {error}"
            ) from error

    def _steps_of_mirror(self) -> list[int]:
        """Steps in the mirror; none where it cannot be read."""
        if self._mirror is None or time.monotonic() < self._asks_again:
            return []
        try:
            with at_most(_SHORT_SECONDS):
                return self._mirror.steps()
        except (StoreError, OSError) as error:
            self._asks_again = time.monotonic() + _PAUSE_SECONDS
            logger.warning(
                "the mirror cannot be read, so that its checkpoints are left out for %.0f s: %s", _PAUSE_SECONDS, error
            )
            return []
