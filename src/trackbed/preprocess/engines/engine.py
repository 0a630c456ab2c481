"""Interface of an engine, the engine that runs tasks in this process, and the scheduler of tasks over an engine.

The scheduler bounds the tasks in flight, and retries those whose worker died.
"""

import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

from trackbed.errors import TrackbedError
from trackbed.preprocess.worker_pool import JobResult, run_job

ASKED: Final = -1
"""Number of the task that `ask_hosts` runs."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """End of one attempt at a task: its result, the error that it raised, or the death of its worker."""

    number: int
    """Number of the task."""
    result: Any = None
    error: Exception | None = None
    death: str | None = None
    """Description of the end of a worker that died."""
    is_certain: bool = True
    """False if the worker may have died of another task."""


class Engine(Protocol):
    """Runs tasks in workers. A task whose worker dies is reported, not tried again.

    An engine is created with a picklable function, which is called with each task.
    """

    @property
    def slots(self) -> int:
        """Number of tasks that run at once, at least 1; may change when hosts join or are lost."""

    def ask_hosts(self, task: Any) -> list[Attempt]:
        """Runs a task once on every host that is present, or on some host if the engine cannot address them."""

    def start(self, number: int, task: Any) -> None:
        """Queues a task. Does not wait.

        Args:
            number: number of the task, which no task in flight has.
            task: picklable argument of the function; error messages name it by its `str`.

        Raises:
            TrackbedError: the engine can run no further task.
        """

    def wait(self, timeout_seconds: float) -> list[Attempt]:
        """Returns the attempts that have ended, after waiting for at most `timeout_seconds` for the first one."""

    def close(self) -> None:
        """Ends the tasks in flight, as far as the engine can, and frees what it holds."""


def ask_one_worker(engine: Engine, task: Any) -> list[Attempt]:
    """Runs a task in one worker of an engine that cannot address hosts, and waits for it."""
    engine.start(ASKED, task)
    found: list[Attempt] = []
    while not found:
        found = engine.wait(1)
    return found


def run_pickled(work: bytes, task: bytes) -> JobResult:
    """Runs a pickled task by a pickled function, which a process unpickles once; the entry point of remote workers."""
    try:
        function = _unpickled(work)
    except Exception as error:  # noqa: BLE001  it crosses to the driver
        return run_job(_raise, error)
    return run_job(lambda raw: function(pickle.loads(raw)), task)


@lru_cache(maxsize=1)
def _unpickled(work: bytes) -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = pickle.loads(work)
    return found


def _raise(error: Exception) -> None:
    raise error


class InProcessEngine:
    """Engine without workers: `wait` runs a task."""

    slots = 1

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self._waiting: deque[tuple[int, Any]] = deque()

    def ask_hosts(self, task: Any) -> list[Attempt]:
        """Runs a task in this process."""
        return [self._run(0, task)]

    def start(self, number: int, task: Any) -> None:
        """Queues a task."""
        self._waiting.append((number, task))

    def wait(self, timeout_seconds: float) -> list[Attempt]:
        """Runs the next task, however long it takes."""
        return [self._run(*self._waiting.popleft())] if self._waiting else []

    def close(self) -> None:
        """Drops the queued tasks."""
        self._waiting.clear()

    def _run(self, number: int, task: Any) -> Attempt:
        try:
            return Attempt(number, result=self._work(task))
        except Exception as error:  # noqa: BLE001  the caller raises it in the place of the result
            return Attempt(number, error=error)


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
