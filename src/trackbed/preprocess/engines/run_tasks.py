"""Scheduler of tasks over an engine: bounds the tasks in flight, and retries those whose worker died."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from trackbed.errors import TrackbedError
from trackbed.preprocess.engines.engine import Attempt, Engine

MAX_RETRIES: Final = 3
"""Retries of a task whose worker died."""

_TASKS_PER_SLOT: Final = 2
_WAIT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt at a task whose worker died; the task is tried again."""

    task: str
    """Description of the task."""
    attempt: int
    """Number of the attempt, from 1."""
    how: str
    """Description of the end of the worker."""


def run_tasks(
    engine: Engine, tasks: Iterable[tuple[int, Any]], *, on_failure: Callable[[FailedAttempt], None]
) -> Iterator[tuple[int, Any]]:
    """Yields number and result of each task, in the order in which they are finished.

    Args:
        engine: runs the tasks; the caller closes it.
        tasks: number and argument of each task, consumed lazily: at most two tasks per slot are in flight.
        on_failure: called when a task is tried again.
    """
    yield from _Run(engine, iter(tasks), on_failure).results()


class _Run:
    """State of `run_tasks`."""

    def __init__(
        self, engine: Engine, tasks: Iterator[tuple[int, Any]], on_failure: Callable[[FailedAttempt], None]
    ) -> None:
        self._engine = engine
        self._tasks = tasks
        self._on_failure = on_failure
        self._in_flight: dict[int, Any] = {}
        self._deaths: dict[int, int] = {}
        self._again: deque[tuple[int, Any]] = deque()
        self._alone: deque[tuple[int, Any]] = deque()
        """Tasks at their last attempt that may not be what their workers died of."""

    def results(self) -> Iterator[tuple[int, Any]]:
        while True:
            self._start_tasks()
            if not self._in_flight:
                return
            for attempt in self._engine.wait(_WAIT_SECONDS):
                task = self._in_flight.pop(attempt.number)
                if attempt.error is not None:
                    raise attempt.error
                if attempt.death is not None:
                    self._retry(attempt, task, attempt.death)
                else:
                    self._deaths.pop(attempt.number, None)
                    yield attempt.number, attempt.result

    def _start_tasks(self) -> None:
        if self._alone:
            if not self._in_flight:
                self._start(*self._alone.popleft())
            return
        while len(self._in_flight) < _TASKS_PER_SLOT * self._engine.slots:
            following = self._again.popleft() if self._again else next(self._tasks, None)
            if following is None:
                return
            self._start(*following)

    def _start(self, number: int, task: Any) -> None:
        self._in_flight[number] = task
        self._engine.start(number, task)

    def _retry(self, attempt: Attempt, task: Any, how: str) -> None:
        deaths = self._deaths[attempt.number] = self._deaths.get(attempt.number, 0) + 1
        if deaths > MAX_RETRIES:
            raise TrackbedError(
                f"{task}: a worker must survive this task, found that {deaths} have died, the last one: {how}"
            )
        self._on_failure(FailedAttempt(str(task), deaths, how))
        is_alone = deaths == MAX_RETRIES and not attempt.is_certain
        (self._alone if is_alone else self._again).append((attempt.number, task))
