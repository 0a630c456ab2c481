"""Engine that runs tasks in this process, one after the other."""

from collections import deque
from collections.abc import Callable
from typing import Any

from trackbed.preprocess.engines.engine import Attempt

__all__ = ["InProcessEngine"]


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

    def wait(self, timeout_seconds: float) -> list[Attempt]:  # noqa: ARG002  signature of an engine
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
