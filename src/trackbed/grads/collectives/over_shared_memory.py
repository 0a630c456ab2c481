"""Collectives of ranks on one host, on buffers that all of them map.

Each rank adds its part of all ranks' buffers in place, in one pass, so that no number is copied to be sent. The ranks
meet before and after each operation at counters in shared memory, on which they sleep.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt
import torch

from trackbed.comm import Group
from trackbed.comm.blocking_calls import Worker
from trackbed.comm.shared_memory import COUNTER_BYTES, SharedCounters, SharedMemory
from trackbed.errors import ArgumentError, CollectiveError
from trackbed.grads.collectives.protocol import (
    DONE,
    MAX_NUMBERS,
    NO_LABEL,
    Exchange,
    Label,
    Work,
    array_of,
    check_places,
)
from trackbed.kernels import sum_ranks

Bytes = npt.NDArray[np.uint8]

_THREAD_NAME: Final = "trackbed-collectives"
_LABEL_WORDS: Final = 8
_SCRATCH_BYTES: Final = 1 << 20
_DRAIN_SECONDS: Final = 5.0
_STOP_SECONDS: Final = 5.0
_KINDS: Final = ("all-reduce", "reduce-scatter", "all-gather", "exchange of numbers", "broadcast")
_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _EXCHANGE, _BROADCAST = range(len(_KINDS))


class SharedMemoryCollectives:
    """Collectives of the ranks of one host, on buffers in shared memory. See `Collectives`.

    The operations run on a thread of their own, one after the other.

    Args:
        rank: number of this rank, in `[0, size)`.
        size: number of ranks.
        control: memory through which the ranks meet, of `control_bytes(size)`.
        memories: each rank's mapping of each memory with buffers, in rank order.
    """

    def __init__(self, rank: int, size: int, control: SharedMemory, memories: Sequence[Sequence[SharedMemory]]) -> None:
        self._rank = rank
        self._size = size
        self._barrier = _OperationBarrier(rank, size, control)
        self._views: list[list[Bytes]] = [[memory.view(np.uint8) for memory in ranks] for ranks in memories]
        self._scratch = self._barrier.scratch
        self._worker = Worker(_THREAD_NAME)
        # A thread must not wait in compiled code while the interpreter ends.
        weakref.finalize(self, _stop, weakref.ref(self), self._barrier, self._worker)

    @classmethod
    def connect(cls, group: Group, memories: Sequence[SharedMemory], problem: str | None = None) -> "Self | str":
        """Collective over `group`: maps the memories of all ranks.

        Args:
            group: the ranks.
            memories: this rank's memories that hold buffers, as many and as large on every rank.
            problem: reason why this rank has no such memories; None if it has.

        Returns:
            The collectives; or, on every rank, why a rank cannot share its memory or map that of another.
        """
        own_control = None
        try:
            if group.rank == 0:
                own_control = SharedMemory.create(control_bytes(group.size))
        except OSError as error:
            problem = problem or _brief(error)
        offers = group.all_gather(
            [problem, own_control and own_control.offer(), [memory.offer() for memory in memories]]
        )
        why = _first_problem("cannot share memory", [offer[0] for offer in offers])
        if why is not None:
            return why
        attached: list[list[SharedMemory]] = []
        try:
            control = own_control or SharedMemory.attach(offers[0][1])
            for number, own in enumerate(memories):
                offered = [memory_offers[number] for _, _, memory_offers in offers]
                attached.append(
                    [own if rank == group.rank else SharedMemory.attach(offer) for rank, offer in enumerate(offered)]
                )
        except OSError as error:
            problem = _brief(error)
        why = _first_problem("cannot map the memory of another rank", group.all_gather(problem))
        return cls(group.rank, group.size, control, attached) if why is None else why

    def rank(self) -> int:
        """Number of this rank."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def num_issued(self) -> int:
        """Number of operations that were given to the thread."""
        return self._barrier.number

    def stop(self, reason: str = "the collectives have been stopped") -> None:
        """Ends the operation that is running and all others with an error. Thread-safe."""
        self._barrier.stop(reason)

    def all_reduce(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Replaces each buffer by the sum over all ranks."""
        spans = [_part_of(buffer.numel(), self._rank, self._size) for buffer in buffers]
        work = self._sum(buffers, spans, scale=scale, average=average, owner=None)
        return self._submit(_ALL_REDUCE, label, work)

    def reduce_scatter(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Replaces this rank's shard of each buffer by the sum over all ranks. Other shards keep the scaled numbers."""
        counts = [buffer.numel() // self._size for buffer in buffers]
        spans = [(self._rank * count, (self._rank + 1) * count) for count in counts]
        work = self._sum(buffers, spans, scale=scale, average=average, owner=self._rank)
        return self._submit(_REDUCE_SCATTER, label, work)

    def all_gather(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        label: Label,
    ) -> Work:
        """Replaces each shard of each buffer by that of the rank that owns it."""
        parts = [self._arrays_of(buffer) for buffer in buffers]
        own_rank = self._rank

        def gather() -> None:
            for arrays in parts:
                count = len(arrays[0]) // len(arrays)
                for rank, array in enumerate(arrays):
                    if rank != own_rank:
                        shard = slice(rank * count, (rank + 1) * count)
                        arrays[own_rank][shard] = array[shard]

        return self._submit(_ALL_GATHER, label, gather)

    def exchange(
        self, numbers: npt.NDArray[np.int64], *, label: Label = NO_LABEL, more: torch.Tensor | None = None
    ) -> Exchange:
        """Sends a few numbers to all ranks."""
        sent = numbers.copy() if more is None else np.concatenate([numbers, more.numpy()])
        received = np.empty((self._size, len(sent)), dtype=np.int64)
        slots = self._scratch[: self._size * 8 * len(sent)].view(np.int64).reshape(received.shape)
        own = slots[self._rank]

        def send() -> None:
            own[:] = sent

        def receive() -> None:
            received[:] = slots

        return Exchange(self._submit(_EXCHANGE, label, receive, before=send), lambda _: received)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int) -> Work:
        """Replaces the tensors by those of rank `source`, through the scratch memory."""
        work: Work = DONE
        for tensor in tensors:
            content = tensor.detach().contiguous()
            flat = array_of(content.view(-1).view(torch.uint8))
            for number, start in enumerate(range(0, len(flat), _SCRATCH_BYTES)):
                work = self._broadcast_bytes(flat[start : start + _SCRATCH_BYTES], source, Label(bucket=number))
            if self._rank != source and content.data_ptr() != tensor.data_ptr():
                work.wait()
                tensor.detach().copy_(content)
        return work

    def _sum(
        self,
        buffers: Sequence[torch.Tensor],
        spans: Sequence[tuple[int, int]],
        *,
        scale: float,
        average: bool,
        owner: int | None,
    ) -> Callable[[], None]:
        """Makes the function that sums a span of each buffer over all ranks.

        Args:
            buffers: buffers.
            spans: start and stop of this rank's elements in each buffer.
            scale: factor of the terms.
            average: True to divide the sum by the number of ranks.
            owner: rank that gets the sum; None for all ranks.
        """
        parts = [self._arrays_of(buffer) for buffer in buffers]
        divisor = self._size if average else 1

        def work() -> None:
            for arrays, (start, stop) in zip(parts, spans, strict=True):
                sum_ranks(arrays, start=start, stop=stop, factor=scale, divisor=divisor, owner=owner)

        return work

    def _broadcast_bytes(self, chunk: Bytes, source: int, label: Label) -> Work:
        scratch = self._scratch[: len(chunk)]
        is_source = self._rank == source

        def send() -> None:
            if is_source:
                scratch[:] = chunk

        def receive() -> None:
            if not is_source:
                chunk[:] = scratch

        return self._submit(_BROADCAST, label, receive, before=send)

    def _submit(
        self, kind: int, label: Label, work: Callable[[], None], *, before: Callable[[], None] = lambda: None
    ) -> "_FutureWork":
        """Runs an operation on the thread: `before`, then `work` once all ranks are there.

        Neither may refer to this object, whose last reference ends an operation that is running.
        """
        barrier = self._barrier

        def operate() -> None:
            before()
            barrier.begin(kind, label)
            work()
            barrier.end()

        barrier.number += 1
        return _FutureWork(self._worker.submit(operate), barrier, barrier.number)

    def _arrays_of(self, buffer: torch.Tensor) -> list[npt.NDArray[Any]]:
        """Views of a buffer's place in the memory of each rank."""
        array = array_of(buffer)
        if array.nbytes == 0:
            return [array] * self._size
        address = array.__array_interface__["data"][0]
        for views in self._views:
            start = address - views[self._rank].__array_interface__["data"][0]
            if start >= 0 and start + array.nbytes <= len(views[self._rank]):
                return [view[start : start + array.nbytes].view(array.dtype) for view in views]
        raise ArgumentError("shared memory: a buffer must lie in memory that the ranks share, but does not")


def control_bytes(size: int) -> int:
    """Number of bytes that `size` ranks need to meet."""
    return size * (2 * COUNTER_BYTES + 8 * _LABEL_WORDS) + max(_SCRATCH_BYTES, size * 8 * MAX_NUMBERS)


class _OperationBarrier:
    """Brings the ranks together before and after each operation, and checks that all are at the same one.

    Each rank has a counter of operations it started, one of those it ended, and a place for its label, which
    is written before the first counter.
    """

    def __init__(self, rank: int, size: int, control: SharedMemory) -> None:
        self._rank = rank
        self._size = size
        self._counters = SharedCounters(control)
        labels_start = size * 2 * COUNTER_BYTES
        scratch_start = labels_start + size * 8 * _LABEL_WORDS
        control_view = control.view(np.uint8)
        self._labels = control_view[labels_start:scratch_start].view(np.int64).reshape(size, _LABEL_WORDS)
        self.scratch: Bytes = control_view[scratch_start:]
        self.number = 0
        """Number of operations that were submitted."""
        self.process = os.getpid()
        self._failure: str | None = None
        """Reason why no more operations are to run. Any thread may set it."""
        self._begun = 0

    def stop(self, reason: str) -> None:
        """Ends the operation that is running and all others with an error. Thread-safe."""
        self._failure = self._failure or f"gradients: {reason}"

    def begin(self, kind: int, label: Label) -> None:
        """Waits until all ranks have begun the operation."""
        self._poll(0)
        self._begun += 1
        self._labels[self._rank, :3] = (kind, *label)
        self._counters.set(self._rank, self._begun)
        self._counters.wait(0, self._size, self._begun, self._poll)
        found = self._labels[:, :3]
        if (found != found[self._rank]).any():
            try:
                check_places(self._rank, [(_KINDS[kind], Label(step, bucket)) for kind, step, bucket in found.tolist()])
            except CollectiveError as error:
                self._failure = str(error)  # else this rank's label could change before the others have read it
                raise

    def end(self) -> None:
        """Waits until all ranks have ended the operation, so that buffers may be changed again."""
        self._counters.set(self._size + self._rank, self._begun)
        self._counters.wait(self._size, self._size, self._begun, self._poll)

    def _poll(self, done: int) -> None:
        if self._failure is not None:
            raise CollectiveError(self._failure)

    def late_ranks(self, number: int) -> list[int]:
        """Ranks that have not begun operation `number`; if all have begun it, the ranks that have not ended it."""
        for first in (0, self._size):
            late = [rank for rank in range(self._size) if not self._counters.has_reached(first + rank, number)]
            if late:
                return late
        return []


class _FutureWork:
    """Operation on the thread of the collectives. See `Work`."""

    def __init__(self, future: Future[None], barrier: _OperationBarrier, number: int) -> None:
        self._future = future
        self._barrier = barrier
        self._number = number

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the thread."""
        with contextlib.suppress(TimeoutError):
            self._future.result(seconds)
            return True
        return False

    def is_done(self) -> bool:
        """True if the thread has ended the operation."""
        return self._future.done()

    def on_done(self, call: Callable[[], None]) -> None:
        """Calls `call` on the thread, after the operation."""
        self._future.add_done_callback(lambda _: call())

    def late_ranks(self) -> list[int]:
        """Ranks that have not begun, or not ended, the operation."""
        return self._barrier.late_ranks(self._number)


def _stop(collectives_of: "weakref.ref[SharedMemoryCollectives]", barrier: _OperationBarrier, worker: Worker) -> None:
    """Ends the operations that are running.

    Where the program has ended while the collectives were in use, the operations have some time, because other ranks
    may need them. The thread must have left compiled code before the interpreter ends, so it is waited for; garbage may
    also be collected on that thread itself, which must not wait.
    """
    if not barrier.number or os.getpid() != barrier.process:  # a forked child has no such thread
        return
    end = worker.submit(lambda: None)
    if collectives_of() is not None:
        wait([end], _DRAIN_SECONDS)
    barrier.stop("the collectives have been stopped")
    if threading.current_thread().name != _THREAD_NAME:
        wait([end], _STOP_SECONDS)


def _first_problem(what: str, problems: Sequence[str | None]) -> str | None:
    """Sentence about the first rank with a problem."""
    return next((f"rank {rank} {what}: {why}" for rank, why in enumerate(problems) if why is not None), None)


def _brief(error: OSError) -> str:
    return f"{type(error).__name__}: {error}"


def _part_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """Start and stop of a rank's part of `count` elements, at multiples of 64 so that no cache line is shared."""
    lines = -(-count // 64)
    return min(count, lines * rank // size * 64), min(count, lines * (rank + 1) // size * 64)
