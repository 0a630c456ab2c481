"""Interface of an engine, the entry point of its workers, and the engine that runs tasks in this process."""

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Protocol

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
    """Engine without workers: `wait` runs a task.

    Args:
        work: function of a task.
    """

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
