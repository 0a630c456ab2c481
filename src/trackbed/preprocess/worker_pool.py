"""Worker processes that run one picklable function on job after job, and the distribution of jobs over them.

`concurrent.futures` does not report which job killed a worker, and cannot end a busy worker. Both matter here, as a
job can use all the memory of a machine, or take minutes.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final, Generic, NamedTuple, TypeVar

from trackbed.datasets.tokenizers.rust_libraries import one_core
from trackbed.errors import TrackbedError
from trackbed.preprocess.messages import NUM_SLOTS, SharedSlots, receive, send

_EXIT_SECONDS: Final = 5
_NO_MORE: Final = object()


class WorkerDiedError(TrackbedError):
    """A worker process ended in the middle of a job.

    Args:
        job: description of the job.
        how: description of its end.
    """

    def __init__(self, job: str, how: str) -> None:
        super().__init__(f"{job}: a worker process must survive this job, found it {how}")
        self.how = how


@dataclass(frozen=True, slots=True)
class JobResult:
    """Result of a job, or the error that it raised."""

    result: Any
    error: Exception | None


class FinishedJob(NamedTuple):
    """Result received from a worker."""

    job_result: JobResult
    worker: "WorkerProcess"
    slot: int | None


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """Worker process, and the parent's end of its pipe. The next job waits in the pipe while it is busy."""

    process: SpawnProcess
    connection: "Connection[Any, Any]"
    slots: SharedSlots | None
    """Shared memory for the arrays in its results."""
    jobs: deque[tuple[int, Any]] = field(default_factory=deque)
    """Jobs sent and not yet finished, with their numbers, in order."""
    free: list[int] = field(default_factory=lambda: list(range(NUM_SLOTS)))
    """Slots to return to the worker with the next job."""

    def send_work(self, work: bytes) -> None:
        """Sends the pickled function that every job is passed to."""
        with self._raise_if_dead("start of a worker"):
            self.connection.send_bytes(work)

    def send(self, number: int, job: Any) -> None:
        """Sends a job."""
        self.jobs.append((number, job))
        with self._raise_if_dead(self.jobs[0][1]):  # the running job, which killed the worker if it is dead
            self.connection.send((job, tuple(self.free)))
        self.free.clear()

    def receive(self) -> tuple[int, FinishedJob]:
        """Waits for the result of its first job. Returns the number of the job, and the result."""
        number, job = self.jobs[0]
        with self._raise_if_dead(job):
            received = receive(self.connection, self.slots)
        self.jobs.popleft()
        return number, FinishedJob(received.message, self, received.slot)

    def end(self) -> None:
        """Kills the process, busy or not; it holds nothing that needs cleanup."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()

    @contextlib.contextmanager
    def _raise_if_dead(self, job: Any) -> Iterator[None]:
        """Turns a broken pipe inside the block into the error that the process died at `job`."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self.process.join(timeout=_EXIT_SECONDS)
            code = self.process.exitcode or 0
            how = (
                f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
            )
            memory = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
            raise WorkerDiedError(str(job), f"{how}{memory}") from error


def start_workers(pool: list[WorkerProcess], count: int, work: bytes) -> None:
    """Starts workers, adds them to the pool, and then sends the work to all.

    Args:
        pool: list that receives the workers; the caller ends them, also if this raises.
        count: number of workers to start.
        work: the pickled function that jobs are passed to.
    """
    context = multiprocessing.get_context("spawn")
    # The resource tracker unblocks the signals that are blocked below, so it must start first.
    resource_tracker.ensure_running()
    for _ in range(count):
        ours, theirs = context.Pipe()
        slots = SharedSlots.create()
        process = context.Process(target=_serve, args=(theirs, slots), daemon=True)
        with _interrupts_blocked(), one_core():  # before the worker loads any library
            process.start()
        theirs.close()  # so that the pipe breaks when the worker dies
        pool.append(WorkerProcess(process, ours, slots))
    for worker in pool[len(pool) - count :]:
        worker.send_work(work)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Blocks SIGINT in new processes until they ignore it, since their parent ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: "Connection[Any, Any]", slots: SharedSlots | None) -> None:
    """Main function of a worker: receives the work, then runs jobs until the pipe breaks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        work = pickle.loads(connection.recv_bytes())
        gc.freeze()  # excludes objects that live until exit from garbage collection
        jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        free: deque[int] = deque()
        threading.Thread(target=_receive_jobs, args=(connection, jobs, free), daemon=True).start()
        while (job := jobs.get()) is not _NO_MORE:
            job_result = run_job(work, job)
            slot = free.popleft() if free else None
            if not send(connection, job_result, slots, slot) and slot is not None:
                free.append(slot)


def _receive_jobs(connection: "Connection[Any, Any]", jobs: "queue.SimpleQueue[Any]", free: deque[int]) -> None:
    """Receives jobs as soon as they arrive, so that the two ends of the pipe cannot block each other."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            job, slots = connection.recv()
            free.extend(slots)
            jobs.put(job)
    jobs.put(_NO_MORE)


def run_job(work: Callable[[Any], Any], job: Any) -> JobResult:
    """Returns the result of a job, or an error that can be sent to another process."""
    try:
        return JobResult(work(job), None)
    except (TrackbedError, OSError, ValueError) as error:
        return JobResult(None, error)
    except MemoryError:
        return JobResult(None, TrackbedError(f"{job}: this must fit into memory, found too little free"))
    except BaseException as error:  # noqa: BLE001  it crosses to the parent; a panic in Rust is no Exception
        # The error itself may not be picklable, and does not name the job.
        return JobResult(None, RuntimeError(f"{job}: {type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """Ends the process as soon as the parent is gone, even in the middle of a job."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class WorkerPool:
    """Workers, each with the jobs that wait for it.

    Args:
        work: the pickled function that jobs are passed to.
        jobs_per_worker: most jobs of a worker, the running one included, at least 1.
    """

    def __init__(self, work: bytes, *, jobs_per_worker: int) -> None:
        self._work = work
        self._jobs_per_worker = jobs_per_worker
        self._workers: list[WorkerProcess] = []

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._workers)

    @property
    def num_idle(self) -> int:
        """Number of workers without a job."""
        return sum(not worker.jobs for worker in self._workers)

    @property
    def has_space(self) -> bool:
        """True if a worker can take a job."""
        return any(len(worker.jobs) < self._jobs_per_worker for worker in self._workers)

    def grow(self, count: int) -> None:
        """Starts workers."""
        start_workers(self._workers, count, self._work)

    def send(self, number: int, job: Any) -> None:
        """Sends a job to the least busy worker. Requires space."""
        worker = min(self._workers, key=lambda one: len(one.jobs))
        try:
            worker.send(number, job)
        except WorkerDiedError:
            self._remove(worker)
            raise

    def receive(self, timeout: float | None) -> Iterator[tuple[int, "FinishedJob | WorkerDiedError"]]:
        """Yields finished jobs with their numbers, waiting up to `timeout` seconds for the first; None has no limit.

        The first job of a worker that died has an error in the place of its result, and the worker is removed.
        """
        busy = [worker for worker in self._workers if worker.jobs]
        ready = wait([worker.connection for worker in busy], timeout)
        for worker in busy:
            if worker.connection not in ready:
                continue
            number = worker.jobs[0][0]
            try:
                _, finished = worker.receive()
            except WorkerDiedError as error:
                self._remove(worker)
                yield number, error
            else:
                yield number, finished

    def close(self) -> None:
        """Kills the workers."""
        while self._workers:
            self._workers.pop().end()

    def _remove(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        worker.end()


_JOBS_AHEAD: Final = 4
"""Jobs per worker that may be sent ahead of the next result; bounds the memory of finished results."""

_JOBS_PER_WORKER: Final = 2
"""Jobs queued per worker: the running one and a prefetched one."""

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
    """
    waiting = iter(jobs)
    first = list(islice(waiting, workers))
    if len(first) <= 1:
        yield from map(work, chain(first, waiting))
        return
    with contextlib.closing(WorkerPool(pickle.dumps(work), jobs_per_worker=_JOBS_PER_WORKER)) as pool:
        pool.grow(len(first))
        yield from _InOrder(pool, chain(first, waiting)).results()


class _InOrder(Generic[Job, Result]):
    """Sends jobs ahead of the next result, and holds results until their turn."""

    def __init__(self, pool: WorkerPool, jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._pool = pool
        self._done: dict[int, FinishedJob] = {}
        self._sent = 0
        self._has_more = True
        self._max_ahead = _JOBS_AHEAD * pool.size

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
        while self._has_more and self._sent < position + self._max_ahead and self._pool.has_space:
            job = next(self._jobs, _NO_MORE)
            if job is _NO_MORE:
                self._has_more = False
                return
            self._pool.send(self._sent, job)
            self._sent += 1

    def _collect(self, *, timeout: float | None) -> None:
        """Receives available results, waiting up to `timeout` seconds for the first one; None waits without limit."""
        for number, finished in self._pool.receive(timeout):
            if isinstance(finished, WorkerDiedError):
                raise finished
            self._done[number] = finished
