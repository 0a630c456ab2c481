"""Process pool that returns results in the order of the jobs."""

import pickle
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import chain, islice
from multiprocessing.connection import wait
from typing import Final, Generic, TypeVar

from trackbed.preprocess.worker_process import FinishedJob, WorkerProcess, start_workers

__all__ = ["map_in_order"]

_JOBS_AHEAD: Final = 4
"""Jobs per worker that may be sent ahead of the next result; bounds the memory of finished results."""

_JOBS_PER_WORKER: Final = 2
"""Jobs queued per worker: the running one and a prefetched one."""

_NO_MORE: Final = object()

Job = TypeVar("Job")
Result = TypeVar("Result")


def map_in_order(work: Callable[[Job], Result], jobs: Iterable[Job], *, workers: int) -> Generator[Result]:
    """Yields `work(job)` for each job, in order; an error in a job is raised in place of its result.

    Arrays in a result are valid until the next result is requested, as their memory is shared with the worker.

    The workers end when the iterator is closed, when it raises, and when this process ends for any reason.

    Args:
        work: a picklable function; with one worker it is called in this process.
        jobs: its arguments, consumed lazily; error messages name a job by its `str`.
        workers: number of processes, at least 1; never more than there are jobs.

    Raises:
        TrackbedError: a worker died; the message states the cause and the job.
    """
    waiting = iter(jobs)
    first = list(islice(waiting, workers))
    if len(first) <= 1:
        yield from map(work, chain(first, waiting))
        return
    pool: list[WorkerProcess] = []
    try:
        start_workers(pool, len(first), pickle.dumps(work))
        yield from _Scheduler(pool, chain(first, waiting)).results()
    finally:
        for worker in pool:
            worker.end()


class _Scheduler(Generic[Job, Result]):
    """Distributes jobs over workers, and holds results until their turn.

    Args:
        pool: idle workers.
        jobs: the jobs.
    """

    def __init__(self, pool: list[WorkerProcess], jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._pool = pool
        self._done: dict[int, FinishedJob] = {}
        self._sent = 0
        self._has_more = True
        self._max_ahead = _JOBS_AHEAD * len(pool)

    def results(self) -> Iterator[Result]:
        """Yields the results in the order of the jobs."""
        position = 0
        while True:
            self._send_jobs(position)
            if not self._has_more and position == self._sent:
                return
            # Does not block: results may have arrived while the consumer processed the last one.
            self._collect(timeout=0)
            self._send_jobs(position)
            while position not in self._done:
                self._collect(timeout=None)
                self._send_jobs(position)
            job_result, worker, slot = self._done.pop(position)
            if job_result.error is not None:
                raise job_result.error
            yield job_result.result
            if slot is not None:
                worker.free.append(slot)
            position += 1

    def _send_jobs(self, position: int) -> None:
        """Sends jobs to the least busy workers, up to `_max_ahead` jobs ahead of `position`."""
        while self._has_more and self._sent < position + self._max_ahead:
            worker = min(self._pool, key=lambda one: len(one.jobs))
            if len(worker.jobs) >= _JOBS_PER_WORKER:
                return
            job = next(self._jobs, _NO_MORE)
            if job is _NO_MORE:
                self._has_more = False
                return
            worker.send(self._sent, job)
            self._sent += 1

    def _collect(self, *, timeout: float | None) -> None:
        """Receives available results, waiting up to `timeout` seconds for the first one; None waits without limit."""
        busy = [worker for worker in self._pool if worker.jobs]
        ready = wait([worker.connection for worker in busy], timeout)
        for worker in busy:
            if worker.connection in ready:
                number, done = worker.receive()
                self._done[number] = done
