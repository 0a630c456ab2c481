"""Removal of the checkpoints that are not to be kept, behind the training loop."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

from trackbed.checkpointer.runs import AnyRun
from trackbed.checkpointer.steps import Retention, StepNames
from trackbed.errors import TrackbedError

logger = logging.getLogger(__name__)

_Chosen = TypeVar("_Chosen", bound=int | None)


class Removal:
    """Removes checkpoints of a run, and none that is in use.

    Args:
        run: the run.
        names: names of the folders of steps.
        retention: which checkpoints are kept.
    """

    def __init__(self, run: AnyRun, names: StepNames, retention: Retention) -> None:
        self._run, self._names, self._retention = run, names, retention
        self._in_use: set[int | None] = set()
        self._hidden: list[Callable[[], None]] = []
        """Functions that remove the files of checkpoints that are none any more."""
        self._lock = Lock()
        """Held while checkpoints are chosen, to be used or to be removed."""

    def use(self, choose: Callable[[], _Chosen]) -> _Chosen:
        """Chooses a step, and keeps its checkpoint until `release`; nothing is removed between the two."""
        with self._lock:
            step = choose()
            self._in_use.add(step)
        return step

    def release(self, step: int | None) -> None:
        """Lets the checkpoint of a step be removed again."""
        self._in_use.discard(step)

    @contextmanager
    def using(self, step: int) -> Iterator[None]:
        """Keeps a checkpoint while the block runs."""
        self._in_use.add(step)
        try:
            yield
        finally:
            self.release(step)

    def try_keep(self, step: int) -> None:
        """Calls the function of the program that says what is kept, if there is one, for what it may raise."""
        if callable(self._retention.keep):
            self._retention.keep(step)

    def hide_old(self, others: Collection[int]) -> None:
        """Makes checkpoints none that are not to be kept. One that stays is no reason to fail.

        Args:
            others: further steps that are in use.
        """
        try:
            with self._lock:
                in_use = {*others, *self._in_use}
                for step in self._retention.steps_to_remove(self._run.steps(self._names), in_use):
                    self._hidden.append(self._run.hide(self._names.name(step)))
        except (OSError, TrackbedError) as error:
            logger.warning("%s: earlier checkpoints must be removed, but: %s", self._run, error)
        except Exception:
            logger.exception("%s: earlier checkpoints must be removed, but keep raises", self._run)

    def remove_hidden(self) -> None:
        """Removes the files of checkpoints that are none any more, which may take long."""
        hidden, self._hidden = self._hidden, []
        for remove in hidden:
            try:
                remove()
            except (OSError, TrackbedError) as error:
                logger.warning("%s: an earlier checkpoint must be removed, but: %s", self._run, error)
