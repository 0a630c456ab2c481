"""Engine that runs tasks in processes of this host, and replaces those that die."""

import pickle
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from trackbed.preprocess.engines.engine import Attempt, ask_one_worker, run_pickled
from trackbed.preprocess.worker_pool import FinishedJob, WorkerDiedError, WorkerPool


class ProcessEngine:
    """Local pool of processes.

    Args:
        work: picklable function of a task.
        workers: number of processes, at least 1; they start when they are needed.
    """

    def __init__(self, work: Callable[[Any], Any], *, workers: int) -> None:
        self.slots = workers
        self._pool = WorkerPool(pickle.dumps(partial(run_pickled, pickle.dumps(work))), jobs_per_worker=1)
        self._waiting: deque[tuple[int, Any]] = deque()

    def ask_hosts(self, task: Any) -> list[Attempt]:
        """Runs a task in one process of this host."""
        return ask_one_worker(self, task)

    def start(self, number: int, task: Any) -> None:
        """Queues a task for the next idle process."""
        self._waiting.append((number, task))

    def wait(self, timeout_seconds: float) -> list[Attempt]:
        """Gives tasks to idle processes, and returns the attempts that have ended."""
        ended = self._send()
        ended += [_attempt(number, job) for number, job in self._pool.receive(0 if ended else timeout_seconds)]
        ended += self._send()
        return ended

    def close(self) -> None:
        """Kills the processes."""
        self._waiting.clear()
        self._pool.close()

    def _send(self) -> list[Attempt]:
        """Gives tasks to idle processes. Returns the attempts whose process was found dead."""
        missing = min(len(self._waiting) - self._pool.num_idle, self.slots - self._pool.size)
        if missing > 0:
            self._pool.grow(missing)
        ended = []
        while self._waiting and self._pool.has_space:
            number, task = self._waiting.popleft()
            try:
                self._pool.send(number, pickle.dumps(task))
            except WorkerDiedError as error:
                ended.append(Attempt(number, death=error.how))
        return ended


def _attempt(number: int, job: FinishedJob | WorkerDiedError) -> Attempt:
    if isinstance(job, WorkerDiedError):
        return Attempt(number, death=job.how)
    if job.slot is not None:
        job.worker.free.append(job.slot)
    found = job.job_result.result if job.job_result.error is None else job.job_result
    return Attempt(number, result=found.result, error=found.error)
