"""Building the indices that a rank takes, on its threads."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from contextvars import copy_context
from itertools import count, takewhile
from threading import BoundedSemaphore, Event, Lock

from trackbed.builder.schedule import Task, chunk_cost, chunks_of
from trackbed.cache import LazyArrays, build_batch
from trackbed.cancellation import check_cancelled, polling
from trackbed.errors import TrackbedError

Progress = Callable[[int, int, float], None]
"""Called with the number of indices that this rank has built, the number that all ranks build, and the part of the cost
of all that this rank has done: first with none built, and by one thread at a time."""


class Executor:
    """Threads that build indices, chunk by chunk.

    Args:
        indices: those that are missing, in the same order on every rank that builds them.
        num_ranks: number of these ranks, at least 1.
        num_threads: threads that compute at once, at least 1. Small indices, whose files take most of the time, have
            one thread more.
        progress: called after each index that was built.
        num_total: number of indices that are built in all caches; by default the length of `indices`.
        share: part of the cost of all caches that is this one's.
    """

    def __init__(
        self,
        indices: Sequence[LazyArrays],
        *,
        num_ranks: int = 1,
        num_threads: int,
        progress: Progress | None = None,
        num_total: int | None = None,
        share: float = 1.0,
    ) -> None:
        self._wanted = indices
        self._tasks = tasks_of(indices)
        self._chunks = chunks_of(self._tasks, num_ranks)
        self._is_alone = num_ranks == 1
        self._num_threads = num_threads
        self._progress = progress
        self._total = len(indices) if num_total is None else num_total
        self.cost = sum(task.cost for task in self._tasks)
        """Estimated time to build all, in nanoseconds of one thread."""
        self._share_per_cost = share / self.cost if self.cost else 0.0
        self._most_ahead = math.inf if num_ranks == 1 else 2 * chunk_cost(self.cost, num_ranks)
        self._done = 0
        self._done_cost = 0.0
        self._lock = Lock()
        self._taking = Lock()
        self._stopped = Event()
        self._computing = BoundedSemaphore(num_threads)

    def run(self, take: Callable[[], int] | None = None) -> None:
        """Builds the chunks that this rank takes.

        Args:
            take: returns the number of the next chunk that no rank has taken; past the last one when there is none. By
                default this rank takes all, and builds blends on a thread of their own.

        Raises:
            Exception: the first error. All other threads are stopped.
        """
        take = count().__next__ if take is None else take
        if self._progress is not None and self._chunks:
            self._progress(0, self._total, 0.0)
        num_blends = sum(self._is_blend(chunk) for chunk in self._chunks) if self._is_alone else 0
        num_others = len(self._chunks) - num_blends
        queues = [self._chunks_ahead(iter(range(num_blends)))] if num_blends else []
        numbers = iter(range(num_blends, len(self._chunks))) if self._is_alone else iter(take, -1)
        num_workers = self._num_threads + any(task.is_small for task in self._tasks)
        queues += [self._chunks_ahead(numbers)] * min(num_workers, num_others)
        if len(queues) < 2:
            for queue in queues:
                self._work(queue)
            return
        with ThreadPoolExecutor(len(queues), thread_name_prefix="trackbed-build") as pool, polling(self._check_stopped):
            futures = [pool.submit(copy_context().run, self._work, queue) for queue in queues]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                self._stopped.set()
                raise

    def _check_stopped(self, _done: int) -> None:
        if self._stopped.is_set():
            raise CancelledError

    def _is_blend(self, chunk: Sequence[int]) -> bool:
        return self._tasks[chunk[0]].is_blend

    def _work(self, chunks: Iterator[Sequence[int]]) -> None:
        """Builds chunks until none are left; other threads may take from the same iterator."""
        while chunk := self._next(chunks):
            check_cancelled()
            needs_core = not self._tasks[chunk[0]].is_small and not (self._is_alone and self._is_blend(chunk))
            with self._computing if needs_core else nullcontext():
                self._build(chunk)

    def _next(self, chunks: Iterator[Sequence[int]]) -> Sequence[int]:
        with self._taking:
            return next(chunks, ())

    def _build(self, chunk: Sequence[int]) -> None:
        requests = {number: one for number in chunk if (one := self._wanted[number].request) is not None}
        numbers = {id(request): number for number, request in requests.items()}
        known = [self._wanted[number].found for number in requests]
        for request, found in build_batch(list(requests.values()), known):
            number = numbers[id(request)]
            self._wanted[number].note(found)
            with self._lock:
                self._done += 1
                self._done_cost += self._tasks[number].cost
                if self._progress is not None:
                    self._progress(self._done, self._total, self._done_cost * self._share_per_cost)

    def _chunks_ahead(self, numbers: Iterator[int]) -> Iterator[Sequence[int]]:
        """Yields the chunks of these numbers, one chunk ahead, so that the data of that one are read meanwhile.

        But not while a long chunk is built, where another rank could begin the next one sooner.
        """
        chunks = takewhile(bool, map(self._begin, numbers))
        chunk = next(chunks, None)
        while chunk is not None:
            ahead = next(chunks, None) if self._is_short(chunk) else None
            yield chunk
            chunk = ahead or next(chunks, None)

    def _is_short(self, chunk: Sequence[int]) -> bool:
        """True if the next chunk may be taken before this one is built."""
        if self._is_blend(chunk) and not self._is_alone:
            return False
        return sum(self._tasks[number].cost for number in chunk) <= self._most_ahead

    def _begin(self, number: int) -> Sequence[int]:
        """Returns a chunk, whose data are read from the disk from now on; an empty one past the last one."""
        if number >= len(self._chunks):
            return ()
        for one in (self._wanted[task] for task in self._chunks[number]):
            check_cancelled()
            if one.request is not None:
                with suppress(OSError, TrackbedError):  # building says what is wrong
                    one.request.kind.read_ahead(one.request)
        return self._chunks[number]


def tasks_of(arrays: Sequence[LazyArrays]) -> list[Task]:
    """Returns the task of building each of these indices; one that is there costs nothing."""
    names = [f"{one.entry.stem} {number}" for number, one in enumerate(arrays)]
    return [
        Task(name, 0.0)
        if (request := one.request) is None
        else Task(name, request.ingredients.cost(), request.kind.is_blend, request.kind.is_small(request))
        for name, one in zip(names, arrays, strict=True)
    ]
