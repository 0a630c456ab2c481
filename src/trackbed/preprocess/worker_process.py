"""Worker processes that run one picklable function on job after job.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final, NamedTuple

from trackbed.datasets.tokenizers.rust_libraries import one_core
from trackbed.errors import TrackbedError
from trackbed.preprocess.messages import receive, send
from trackbed.preprocess.shared_memory import NUM_SLOTS, SharedSlots

__all__ = ["FinishedJob", "JobResult", "WorkerDiedError", "WorkerProcess", "run_job", "start_workers"]

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

    Raises:
        WorkerDiedError: a worker has ended at its start.
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
