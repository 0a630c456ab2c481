"""Engine that runs tasks in processes of this host, and replaces those that die."""

import pickle
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from trackbed.preprocess.engines.engine import Attempt, ask_one_worker, run_pickled
from trackbed.preprocess.worker_process import WorkerDiedError, WorkerProcess, start_workers

__all__ = ["ProcessEngine"]


class ProcessEngine:
    """Local pool of processes.

    Args:
        work: picklable function of a task.
        workers: number of processes, at least 1; they start when they are needed.
    """

    def __init__(self, work: Callable[[Any], Any], *, workers: int) -> None:
        self.slots = workers
        self._work = pickle.dumps(partial(run_pickled, pickle.dumps(work)))
        self._pool: list[WorkerProcess] = []
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
        busy = [worker for worker in self._pool if worker.jobs]
        ready = wait([worker.connection for worker in busy], 0 if ended else timeout_seconds)
        for worker in busy:
            if worker.connection in ready:
                ended.append(self._receive(worker))
        ended += self._send()
        return ended

    def close(self) -> None:
        """Kills the processes."""
        self._waiting.clear()
        while self._pool:
            self._pool.pop().end()

    def _send(self) -> list[Attempt]:
        """Gives tasks to idle processes. Returns the attempts whose process was found dead."""
        idle = [worker for worker in self._pool if not worker.jobs]
        missing = min(len(self._waiting) - len(idle), self.slots - len(self._pool))
        if missing > 0:
            start_workers(self._pool, missing, self._work)
            idle = [worker for worker in self._pool if not worker.jobs]
        ended = []
        for worker in idle[: len(self._waiting)]:
            number, task = self._waiting.popleft()
            try:
                worker.send(number, pickle.dumps(task))
            except WorkerDiedError as error:
                ended.append(self._bury(worker, number, error))
        return ended

    def _receive(self, worker: WorkerProcess) -> Attempt:
        number = worker.jobs[0][0]
        try:
            _, finished = worker.receive()
        except WorkerDiedError as error:
            return self._bury(worker, number, error)
        if finished.slot is not None:
            worker.free.append(finished.slot)
        found = finished.job_result.result if finished.job_result.error is None else finished.job_result
        return Attempt(number, result=found.result, error=found.error)

    def _bury(self, worker: WorkerProcess, number: int, error: WorkerDiedError) -> Attempt:
        self._pool.remove(worker)
        worker.end()
        return Attempt(number, death=error.how)
