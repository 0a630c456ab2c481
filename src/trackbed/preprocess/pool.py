"""Worker processes that do jobs, with the results in the order of the jobs.

`concurrent.futures` does not say which job killed its worker, and cannot end a worker that is busy; here both
matter, since a job can take all the memory of a machine, or minutes.
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
from trackbed.preprocess.shared_memory import NUM_SLOTS, Slots

__all__ = ["map_in_order"]

_AHEAD: Final = 4
"""Jobs for each worker that may be done before their turn: what bounds the memory of waiting results."""

_AT_HAND: Final = 2
"""Jobs that a worker has: one that it does, and one that it need not wait for."""

_FAREWELL_SECONDS: Final = 5
_NO_MORE: Final = object()

Job = TypeVar("Job")
Result = TypeVar("Result")


def map_in_order(work: Callable[[Job], Result], jobs: Iterable[Job], *, workers: int) -> Generator[Result]:
    """`work` of each job, in the order of the jobs; an error in a job is raised in its place.

    Arrays in a result are valid until the next one is asked for: their memory is the worker's.

    The workers end when the iterator is closed, when it raises, and when this process ends, however it does.

    Args:
        work: a function that pickles; with one worker it is called in this process.
        jobs: what to call it with, made when a worker is to have one; `str` of a job is what errors call it.
        workers: processes to run, at least 1; there are never more than jobs.

    Raises:
        TrackbedError: a worker died; the message says of what, and at which job.
    """
    waiting = iter(jobs)
    first = list(islice(waiting, workers))
    if len(first) <= 1:
        yield from map(work, chain(first, waiting))
        return
    crew: list[_Worker] = []
    try:
        _start(crew, len(first), pickle.dumps(work))
        yield from _Queue(crew, chain(first, waiting)).results()
    finally:
        for worker in crew:
            worker.end()


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a job, or the error that it ended with, which is raised when its turn has come."""

    result: Any
    error: Exception | None


class _Done(NamedTuple):
    """An outcome that has come."""

    outcome: _Outcome
    worker: "_Worker"
    slot: int | None


@dataclass(frozen=True, slots=True)
class _Worker:
    """A process, and our end of the connection to it. The next job waits there while it is busy with one."""

    process: SpawnProcess
    connection: "Connection[Any, Any]"
    slots: Slots | None
    """For the arrays in its results."""
    jobs: deque[tuple[int, Any]] = field(default_factory=deque)
    """What it has been given and not answered: numbers and jobs, in their order."""
    free: list[int] = field(default_factory=lambda: list(range(NUM_SLOTS)))
    """Slots that it is told to be free with the next job."""

    def hand_over(self, work: bytes) -> None:
        """Say what to do with the jobs to come."""
        with self._naming("start of a worker"):
            self.connection.send_bytes(work)

    def send(self, number: int, job: Any) -> None:
        """Give it a job."""
        self.jobs.append((number, job))
        with self._naming(self.jobs[0][1]):  # which it died of, if it did
            self.connection.send((job, tuple(self.free)))
        self.free.clear()

    def receive(self) -> tuple[int, _Done]:
        """What came of its first job, as soon as it is there."""
        number, job = self.jobs[0]
        with self._naming(job):
            received = receive(self.connection, self.slots)
        self.jobs.popleft()
        return number, _Done(received.message, self, received.slot)

    def end(self) -> None:
        """End the process, busy or not: it holds nothing that would have to be put away."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()

    @contextlib.contextmanager
    def _naming(self, job: Any) -> Iterator[None]:
        """A pipe that breaks means that the process died at `job`."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self.process.join(timeout=_FAREWELL_SECONDS)
            code = self.process.exitcode or 0
            how = (
                f"killed by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with exit code {code}"
            )
            memory = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
            msg = f"{job}: a worker process must live to finish this, found it {how}{memory}"
            raise TrackbedError(msg) from error


class _Queue(Generic[Job, Result]):
    """Who does what, and what is done already.

    Args:
        crew: workers that have nothing to do.
        jobs: the jobs to do.
    """

    def __init__(self, crew: list[_Worker], jobs: Iterator[Job]) -> None:
        self._jobs = jobs
        self._crew = crew
        self._done: dict[int, _Done] = {}
        self._given = 0
        self._more = True
        self._most_ahead = _AHEAD * len(crew)

    def results(self) -> Iterator[Result]:
        """The results in order."""
        position = 0
        while True:
            self._give(position)
            if not self._more and position == self._given:
                return
            # Without waiting: whoever takes the results may have been busy with the last one for long.
            self._collect(timeout=0)
            self._give(position)
            while position not in self._done:
                self._collect(timeout=None)
                self._give(position)
            outcome, worker, slot = self._done.pop(position)
            if outcome.error is not None:
                raise outcome.error
            yield outcome.result
            if slot is not None:
                worker.free.append(slot)
            position += 1

    def _give(self, position: int) -> None:
        """Give workers jobs, not too far ahead of the one at `position`."""
        while self._more and self._given < position + self._most_ahead:
            worker = min(self._crew, key=lambda one: len(one.jobs))
            if len(worker.jobs) >= _AT_HAND:
                return
            job = next(self._jobs, _NO_MORE)
            if job is _NO_MORE:
                self._more = False
                return
            worker.send(self._given, job)
            self._given += 1

    def _collect(self, *, timeout: float | None) -> None:
        """Take the results that are there, waiting for the first one for `timeout` seconds, or as long as it takes."""
        busy = [worker for worker in self._crew if worker.jobs]
        ready = wait([worker.connection for worker in busy], timeout)
        for worker in busy:
            if worker.connection in ready:
                number, done = worker.receive()
                self._done[number] = done


def _start(crew: list[_Worker], count: int, work: bytes) -> None:
    """Add `count` workers to the crew, and hand them their work when all of them are on their way."""
    context = multiprocessing.get_context("spawn")
    # This helper of the standard library unblocks the signals that are held below, so it has to be there first.
    resource_tracker.ensure_running()
    for _ in range(count):
        ours, theirs = context.Pipe()
        slots = Slots.create()
        process = context.Process(target=_serve, args=(theirs, slots), daemon=True)
        with _interrupts_held(), one_core():  # before it loads any library
            process.start()
        theirs.close()  # so that the pipe breaks when the worker dies
        crew.append(_Worker(process, ours, slots))
    for worker in crew:
        worker.hand_over(work)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C from processes until they ignore it: ending them is the business of their parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: "Connection[Any, Any]", slots: Slots | None) -> None:
    """The life of a worker: get the work, then do jobs until the pipe breaks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):
        work = pickle.loads(connection.recv_bytes())
        gc.freeze()  # what is there now stays: it need not be looked at again and again
        jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        free: deque[int] = deque()
        threading.Thread(target=_take_jobs, args=(connection, jobs, free), daemon=True).start()
        while (job := jobs.get()) is not _NO_MORE:
            outcome = _do(work, job)
            slot = free.popleft() if free else None
            if not send(connection, outcome, slots, slot) and slot is not None:
                free.append(slot)


def _take_jobs(connection: "Connection[Any, Any]", jobs: "queue.SimpleQueue[Any]", free: deque[int]) -> None:
    """Take jobs as soon as they come, so that no two ends of a pipe wait for each other to be read."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            job, slots = connection.recv()
            free.extend(slots)
            jobs.put(job)
    jobs.put(_NO_MORE)


def _do(work: Callable[[Any], Any], job: Any) -> _Outcome:
    try:
        return _Outcome(work(job), None)
    except (TrackbedError, OSError, ValueError) as error:
        return _Outcome(None, error)
    except MemoryError:
        return _Outcome(None, TrackbedError(f"{job}: this must fit into memory, found too little of it"))
    except BaseException as error:  # noqa: BLE001  it crosses to the parent; a panic in Rust is no Exception
        # Such an error may not pickle, and says nothing about where it came from.
        return _Outcome(None, RuntimeError(f"{job}: {type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """End at once when the parent is gone, even in the middle of a job."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
