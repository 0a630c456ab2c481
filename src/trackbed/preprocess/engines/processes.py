"""Engines on processes: a pool of this host, which replaces those that die, and any `concurrent.futures` executor."""

import pickle
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from functools import partial
from typing import Any

from trackbed.errors import TrackbedError
from trackbed.preprocess.engines.engine import Attempt, ask_one_worker, run_pickled
from trackbed.preprocess.worker_pool import FinishedJob, JobResult, WorkerDiedError, WorkerPool


class ExecutorEngine:
    """Engine over an executor, such as Dask's, an MPI pool or a process pool.

    Executors cannot address hosts, and do not say which task a worker died of. Python's own pool of processes takes no
    task after a worker has died: a function that creates executors lets the engine replace it.

    Args:
        work: picklable function of a task.
        executor: the executor, which stays open; or a function that creates one, which the engine shuts down.
        slots: number of tasks that the executor runs at once, at least 1.
    """

    def __init__(self, work: Callable[[Any], Any], executor: Executor | Callable[[], Executor], *, slots: int) -> None:
        self.slots = slots
        self._work = pickle.dumps(work)
        self._create = None if isinstance(executor, Executor) else executor
        self._executor = executor if isinstance(executor, Executor) else None
        self._in_flight: dict[Future[JobResult], int] = {}

    def ask_hosts(self, task: Any) -> list[Attempt]:
        """Runs a task once, wherever the executor does."""
        return ask_one_worker(self, task)

    def start(self, number: int, task: Any) -> None:
        """Submits a task."""
        if self._executor is None and self._create is not None:
            self._executor = self._create()
        try:
            future = self._opened.submit(run_pickled, self._work, pickle.dumps(task))
        except RuntimeError as error:  # a broken executor, or one that was shut down
            way = "give a function that creates one, so that it can be replaced" if self._create is None else "see why"
            raise TrackbedError(
                f"{task}: the executor must take this task, found that it does not: {error}; {way}"
            ) from error
        self._in_flight[future] = number

    def wait(self, timeout_seconds: float) -> list[Attempt]:
        """Returns the attempts that have ended."""
        if not self._in_flight:
            return []
        done, _ = wait(self._in_flight, timeout_seconds, FIRST_COMPLETED)
        is_certain = len(self._in_flight) == 1
        ended = [self._end(future, is_certain=is_certain) for future in done]
        if self._create is not None and any(isinstance(_failure(future), BrokenExecutor) for future in done):
            # The others fail too, at once: their attempts are reported before another executor is created.
            rest, _ = wait(self._in_flight)
            ended += [self._end(future, is_certain=False) for future in rest]
            self._opened.shutdown(wait=False)
            self._executor = None
        return ended

    def close(self) -> None:
        """Cancels the tasks that have not begun; shuts the executor down if the engine has created it."""
        for future in self._in_flight:
            future.cancel()
        if self._create is not None and self._executor is not None:
            self._executor.shutdown(wait=not self._in_flight, cancel_futures=True)
        self._in_flight.clear()

    @property
    def _opened(self) -> Executor:
        if self._executor is None:
            raise TrackbedError("the engine must have an executor, found that it is closed")
        return self._executor

    def _end(self, future: "Future[JobResult]", *, is_certain: bool) -> Attempt:
        number = self._in_flight.pop(future)
        failure = _failure(future)
        if failure is None:
            found = future.result()
            return Attempt(number, result=found.result, error=found.error)
        how = f"{type(failure).__name__}: {failure}".rstrip(": ")
        return Attempt(number, death=how, is_certain=is_certain or not isinstance(failure, BrokenExecutor))


def _failure(future: "Future[JobResult]") -> BaseException | None:
    """Returns the exception of the executor; an exception of a task is in the task's result."""
    try:
        return future.exception(timeout=0)
    except CancelledError as error:
        return error


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
