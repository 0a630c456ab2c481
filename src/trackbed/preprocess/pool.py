"""Process pool that returns results in the order of the jobs.

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

from trackbed.datasets.one_core import one_core
from trackbed.errors import TrackbedError
from trackbed.preprocess.messages import receive, send
from trackbed.preprocess.shared_memory import NUM_SLOTS, SharedSlots

__all__ = ["map_in_order"]

_JOBS_AHEAD: Final = 4
"""Jobs per worker that may be sent ahead of the next result; bounds the memory of finished results."""

_JOBS_PER_WORKER: Final = 2
"""Jobs queued per worker: the running one and a prefetched one."""

_EXIT_SECONDS: Final = 5
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
    pool: list[_Worker] = []
    try:
        _start(pool, len(first), pickle.dumps(work))
        yield from _Scheduler(pool, chain(first, waiting)).results()
    finally:
        for worker in pool:
            worker.end()


@dataclass(frozen=True, slots=True)
class _JobResult:
    """Result of a job, or the error that it raised."""

    result: Any
    error: Exception | None


class _FinishedJob(NamedTuple):
    """Result received from a worker."""

    job_result: _JobResult
    worker: "_Worker"
    slot: int | None


@dataclass(frozen=True, slots=True)
class _Worker:
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

    def receive(self) -> tuple[int, _FinishedJob]:
        """Waits for the result of its first job. Returns the number of the job, and the result."""
        number, job = self.jobs[0]
        with self._raise_if_dead(job):
            received = receive(self.connection, self.slots)
        self.jobs.popleft()
        return number, _FinishedJob(received.message, self, received.slot)

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
            msg = f"{job}: a worker process must survive this job, found it {how}{memory}"
            raise TrackbedError(msg) from error


class _Scheduler(Generic[Job, Result]):
    """Distributes jobs over workers, and holds results until their turn.

    Args:
        pool: idle workers.
        jobs: the jobs.
    """

    def __init__(self, pool: list[_Worker], jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._pool = pool
        self._done: dict[int, _FinishedJob] = {}
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


def _start(pool: list[_Worker], count: int, work: bytes) -> None:
    """Starts `count` workers, adds them to the pool, and then sends the work to all."""
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
        pool.append(_Worker(process, ours, slots))
    for worker in pool:
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
            job_result = _do(work, job)
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


def _do(work: Callable[[Any], Any], job: Any) -> _JobResult:
    try:
        return _JobResult(work(job), None)
    except (TrackbedError, OSError, ValueError) as error:
        return _JobResult(None, error)
    except MemoryError:
        return _JobResult(None, TrackbedError(f"{job}: this must fit into memory, found too little free"))
    except BaseException as error:  # noqa: BLE001  it crosses to the parent; a panic in Rust is no Exception
        # The error itself may not be picklable, and does not name the job.
        return _JobResult(None, RuntimeError(f"{job}: {type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """Ends the process as soon as the parent is gone, even in the middle of a job."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
