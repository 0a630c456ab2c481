"""Copies of tensors into memory of the host: at once, or later, before an optimizer changes them."""

import bisect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trackbed.checkpoint.io.pinned_blocks import StreamCopies, is_on_gpu, wait_for
from trackbed.checkpoint.state.divided_tensors import is_divided
from trackbed.daemon_threads import DaemonThreads
from trackbed.errors import CheckpointError

_POLL_SECONDS: Final = 0.02
_PIECE_BYTES: Final = 8 << 20
_MOST_THREADS: Final = 4
_stepped: Final["WeakSet[torch.optim.Optimizer]"] = WeakSet()
"""Optimizers that have made a step since `watch_optimizers` was called."""
_pending: Final["WeakSet[LaterCopies]"] = WeakSet()
_hooks: Final[list[Any]] = []


class Copies:
    """Copies of tensors, of any strides and devices, into contiguous tensors of the host."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._on_gpu: list[tuple[Callable[[], bool], torch.Tensor]] = []
        self._streams: dict[torch.device, StreamCopies] = {}

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Adds a copy. From a GPU it begins, behind what the current stream has been given before."""
        if not is_on_gpu(source.device):
            self._pairs.append((target, source))
            return
        if source.device not in self._streams:
            self._streams[source.device] = StreamCopies(source.device, is_own=True)
        self._on_gpu.append((self._streams[source.device].begin(target, source.detach()), source))

    def finish(self, poll: Callable[[], None], *, num_threads: int = 1) -> None:
        """Copies what is not on a GPU, and waits for the rest.

        Args:
            poll: called again and again; may raise to end the work.
            num_threads: number of threads that copy, this one among them.
        """
        pieces = deque(piece for target, source in self._pairs for piece in _pieces_of(target, source.detach()))
        try:
            with DaemonThreads("trackbed-copy", num_threads=num_threads) as threads:
                try:
                    helping = [threads.submit(partial(_copy, pieces)) for _ in range(min(num_threads, len(pieces)) - 1)]
                    _copy(pieces, poll)
                    for future in helping:
                        future.result()
                finally:
                    pieces.clear()
            for is_over, _ in self._on_gpu:
                wait_for(is_over, poll)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Waits for copies from GPUs that have begun: nothing is written to the targets any more."""
        for copies in self._streams.values():
            copies.wait()

    def order_streams(self) -> None:
        """Has what the current streams of the GPUs are given from now on begin after the copies."""
        for device, copies in self._streams.items():
            copies.order_before(torch.cuda.current_stream(device))

    @property
    def is_on_host(self) -> bool:
        """True if a copy is made by the host, which has to wait for it."""
        return bool(self._pairs)


class LaterCopies:
    """Copies of parameters and states of optimizers, which a thread makes after the snapshot was taken.

    The next step of any optimizer waits for them. What is changed by anything else before it is copied is found out by
    torch's count of changes. It grows once a change has been made, so it is looked at after each copy, and again before
    the next step, in the program's thread, or at the end of the save.
    """

    def __init__(self) -> None:
        self._copies = Copies()
        self._ranges = _ranges_of(_memory_of_optimizers())
        self._starts = [start for start, _ in self._ranges]
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._is_over = threading.Event()
        self._changed: torch.Size | None = None
        """Shape of a tensor that was changed too early."""
        self._lock = threading.Lock()
        _pending.add(self)

    def takes(self, source: torch.Tensor) -> bool:
        """True for a tensor that lies in a parameter, or a state of an optimizer, and counts its changes."""
        start, end = _range_of(source)
        place = bisect.bisect_right(self._starts, start) - 1
        return place >= 0 and end <= self._ranges[place][1] and not source.is_inference()

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Adds a copy."""
        self._copies.add(target, source)
        self._versions.append((source, source._version))

    def make(self, poll: Callable[[], None]) -> None:
        """Makes the copies.

        Args:
            poll: called again and again; may raise to end the work.

        Raises:
            CheckpointError: a tensor was changed before it was copied.
        """
        try:
            self._copies.finish(poll)
            self.check()
        finally:
            self._is_over.set()
            self._copies = Copies()

    def check(self) -> None:
        """Checks that nothing has been changed before it was copied, as far as it can be known now.

        Raises:
            CheckpointError: something was.
        """
        with self._lock:
            self._look()
        if self._changed is not None:
            raise CheckpointError(
                f"snapshot: a parameter or state of shape {list(self._changed)} must be changed by steps of optimizers "
                "alone, but was before it was copied: change it in `with checkpointer.lock()`"
            )

    def _look(self) -> None:
        for source, version in self._versions:
            if source._version != version:
                self._changed = source.shape

    def wait(self) -> None:
        """Waits until nothing is copied any more; for copies from GPUs, the streams wait. Called before each change."""
        copies = self._copies
        copies.order_streams()
        with self._lock:
            self._look()
            if not copies.is_on_host:
                self._versions = []
        while copies.is_on_host and not self._is_over.wait(_POLL_SECONDS):
            pass
        with self._lock:
            self._look()
            self._versions = []  # what changes from now on is not in the copies

    def abandon(self) -> None:
        """Makes no copies, where none was made."""
        self._copies.abandon()
        self.end()

    def end(self) -> None:
        """Ends all waits: the copies are made, or will not be."""
        self._is_over.set()
        _pending.discard(self)
        with self._lock:
            self._copies, self._versions = Copies(), []  # which keep the tensors


def num_copying_threads() -> int:
    """Number of threads that copy while the program waits: this rank's part of the processors, at most 4."""
    num_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    num_processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, min(_MOST_THREADS, num_processors // max(1, int(num_ranks) if num_ranks.isdecimal() else 1)))


def _pieces_of(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields a copy in pieces that several threads can share."""
    if source.is_contiguous() and source.nbytes > _PIECE_BYTES and not (source.is_conj() or source.is_neg()):
        flat_target, flat_source, count = target.view(-1), source.view(-1), _PIECE_BYTES // source.itemsize
        for start in range(0, len(flat_source), count):
            yield flat_target[start : start + count], flat_source[start : start + count]
    else:
        yield target, source


def _copy(pieces: deque[tuple[torch.Tensor, torch.Tensor]], poll: Callable[[], None] = lambda: None) -> None:
    """Makes copies until none is left."""
    with torch.no_grad():
        while True:
            try:
                target, source = pieces.popleft()
            except IndexError:
                return
            target.copy_(source)
            poll()


def watch_optimizers() -> None:
    """Has steps of all optimizers of torch wait for later copies, and learns which optimizers there are."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


os.register_at_fork(after_in_child=_pending.clear)  # no thread of this process makes the copies of its parent


def _before_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
    _stepped.add(optimizer)
    for copies in list(_pending):
        copies.wait()


def _memory_of_optimizers() -> Iterator[torch.Tensor]:
    """Parameters and states of the optimizers that have made a step."""
    for optimizer in list(_stepped):
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            if isinstance(state, dict):
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _ranges_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """First address and end of the memory of tensors, in rising order; those that touch are one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(set(map(_range_of, tensors))):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of the elements of a tensor, and the end; of a `DTensor`, those of its local part."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor) if is_divided(tensor) else tensor
    if not local.numel() or local.is_meta or local.layout is not torch.strided:
        return 0, 0
    extent = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True)) + 1
    return local.data_ptr(), local.data_ptr() + extent * local.itemsize
