"""Waiting for collectives, with an eye on the other ranks.

An operation of NCCL that waits for a rank that has failed keeps its GPU, and a thread that waits for the GPU, such as
one in `loss.item()`, cannot look at the other ranks. `freed_from_failures` ends such operations.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from trackbed.comm import Group, Step
from trackbed.comm.crossed_waits import Operation, Wait, begin_wait
from trackbed.comm.rendezvous import Stopped
from trackbed.comm.store import StoreUnreachable
from trackbed.errors import CollectiveError
from trackbed.grads.collectives import BackendError, TorchCollectives, Work
from trackbed.grads.timeline import BucketObserver
from trackbed.plural import number_of

_SLICE_SECONDS: Final = 0.05
_LONGEST_SLICE_SECONDS: Final = 1.0
_LAST_WORDS_SECONDS: Final = 0.75
"""Time that is left, after a rank was seen to have ended, for what it has sent before."""
_SPIN_SECONDS: Final = 0.0002
_LONGEST_SLEEP_SECONDS: Final = 0.001
_LOOK_SECONDS: Final = 1.0
"""Time after which a wait asks whether the ranks are at the same step."""
_OBSERVATION: Final = 0.6
"""Part of the timeout after which the signs of life of the ranks are recorded, to be compared with those at its end."""


class QueuedCopy:
    """Copy from a GPU, as a work. See `Work`.

    Args:
        event: event that is recorded behind the copy.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the copy, without a call that nothing can end."""
        began = time.monotonic()
        while not self.is_done():
            passed = time.monotonic() - began
            if seconds is not None and passed >= seconds:
                return False
            # Most copies are over within microseconds, so that a sleep at once would cost more than the copy.
            if passed > _SPIN_SECONDS:
                time.sleep(min(_LONGEST_SLEEP_SECONDS, passed / 10))
        return True

    def is_done(self) -> bool:
        """True if the copy is over."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def on_done(self, call: Callable[[], None]) -> None:
        """Waits, and calls `call`."""
        self.wait()
        call()

    def late_ranks(self) -> list[int]:
        """No rank: the GPU does not say."""
        return []


def begin_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, QueuedCopy]:
    """Begins to copy a tensor from a GPU to the host, on the current stream. Returns the copy, and when it is there."""
    # Not `tensor.cpu()`, nor a copy to memory that is not pinned: both block inside the driver. If a kernel before the
    # copy waits for a rank that has failed, they would never return.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.device(tensor.device):
        copy.copy_(tensor, non_blocking=True)
        return copy, QueuedCopy(torch.cuda.current_stream().record_event())


class StreamsThatWaited:
    """Streams of a GPU that wait for an operation, each once; the current one does already."""

    def __init__(self) -> None:
        stream = torch.cuda.current_stream()
        self._is_over = stream.record_event()
        # Not by `cuda_stream`, which streams do not have in functions that torch compiles.
        self._streams = {stream.stream_id}

    def wait(self) -> None:
        """Has the current stream wait, too."""
        stream = torch.cuda.current_stream()
        if stream.stream_id not in self._streams:
            stream.wait_event(self._is_over)
            self._streams.add(stream.stream_id)


class Waiter:
    """Waits for collectives, for as long as the timeout of a group.

    Inside a guarded step, a wait ends as soon as another rank fails. Each wait also gives signs of life, so that a rank
    that gives none can be named.

    Args:
        group: the ranks; None to wait without a limit.
    """

    def __init__(self, group: Group | None = None) -> None:
        self._group = group
        self._signs = 0
        count = getattr(group, "count_user", None)
        self._number = 0 if count is None else count()
        self.step: Step | None = None
        """Guarded step that is running; None if there is none."""
        self.observer: BucketObserver | None = None
        self.look: Callable[[], None] = lambda: None
        """Called in waits that take long. Raises if it finds why they never end."""
        self.num_issued: Callable[[], int] = lambda: 0
        """Number of operations that this rank has issued. Counts only operations that all ranks issue in one order."""

    @property
    def domain(self) -> str:
        """Name of the operations that are waited for here, the same on all ranks."""
        return f"{getattr(self._group, 'domain', '')}/gradients {self._number}"

    @contextlib.contextmanager
    def inside(self, step: Step) -> Iterator[None]:
        """In the block, waits are part of a guarded step."""
        outer, self.step = self.step, step
        try:
            yield
        finally:
            self.step = outer

    def wait(self, work: Work, what: str) -> None:
        """Waits for an operation.

        Args:
            work: operation.
            what: description of it, with which an error begins.

        Raises:
            CollectiveError: the operation failed, or took longer than the timeout; the message names the ranks that it
                waited for, as far as they are known.
        """
        start = time.perf_counter()
        # Noted for short waits, too: other ranks tell from it how far this one has come, and so tell a crossing from a
        # delay.
        ranks = getattr(self._group, "job_ranks", None)
        wait = begin_wait(Operation(self.domain, (self.num_issued(),), what, ranks))
        try:
            self._wait(work, what, wait)
        finally:
            if self.observer is not None:
                self.observer.waited(start, time.perf_counter())

    def read(self, tensor: torch.Tensor, what: str = "numbers of a step") -> torch.Tensor:
        """Copies a tensor to the host, behind what is queued on its GPU.

        Args:
            tensor: tensor on any device.
            what: description, with which an error begins.

        Returns:
            The copy; a tensor of the host itself.

        Raises:
            CollectiveError: see `wait`.
        """
        if tensor.device.type != "cuda":
            return tensor.cpu()
        copy, work = begin_copy(tensor)
        self.wait(work, what)
        return copy

    def _wait(self, work: Work, what: str, wait: Wait) -> None:
        if self._group is None or self._group.size == 1 or work.is_done():
            work.wait()
            return
        timeout = self._group.timeout_seconds
        elapsed = 0.0
        before: list[Any] | None = None
        lost: BackendError | None = None
        seconds_ended = 0.0
        while elapsed < timeout:
            began = time.monotonic()
            if lost is not None:
                # The operation has failed: there is no work left to wait for, only the reason, which another rank
                # reports.
                time.sleep(_SLICE_SECONDS)
            else:
                try:
                    if work.wait(_SLICE_SECONDS):
                        return
                except BackendError as error:
                    if self.step is None:
                        self.raise_cause(what, error)
                        rank = self._group.rank
                        raise BackendError(
                            f"{what}: rank {rank} has lost another rank, or waited for it in vain: {error}"
                        ) from error
                    # Another rank reports why, or gives no more signs of life.
                    lost, elapsed = error, max(elapsed, _OBSERVATION * timeout)
            # In every turn: signs are compared over the last part of the timeout, and a rank that waits must not seem
            # silent.
            self._give_sign()
            wait.check()
            if elapsed >= _LOOK_SECONDS and lost is None:
                self.look()
            # Hardly any time passes for a machine that was suspended, and all its ranks with it.
            passed = min(time.monotonic() - began, _LONGEST_SLICE_SECONDS)
            elapsed += passed
            ended = self._ended()
            seconds_ended += 0.0 if ended is None else passed
            # A rank that has ended may have reported its failure just before. That report says more than its end, and
            # `_give_sign` raises it as soon as it is here.
            if ended is not None and seconds_ended >= _LAST_WORDS_SECONDS:
                raise CollectiveError(f"{what}: {ended}") from lost
            if before is None and elapsed >= _OBSERVATION * timeout:
                before = self._observe()
        late = work.late_ranks() if lost is None else []
        raise CollectiveError(self._describe(what, late or self._silent_since(before))) from lost

    def _ended(self) -> str | None:
        """Text about ranks of this host whose processes have ended; None if there are none, or that is not known."""
        ended_ranks = getattr(self._group, "ended_ranks", None)
        return None if ended_ranks is None else ended_ranks()

    def raise_cause(self, what: str, error: BaseException) -> None:
        """Raises why a connection was lost, if that is known soon: what another rank reports, or whose process ended.

        Args:
            what: description of what needed the connection, with which an error begins.
            error: error of the library that lost it.
        """
        seconds_ended, wanted = 0.0, 0.0 if self.step is None else _LAST_WORDS_SECONDS
        deadline = time.monotonic() + wanted + 6 * _SLICE_SECONDS
        while time.monotonic() < deadline:
            self._give_sign()
            ended = self._ended()
            if ended is not None and seconds_ended >= wanted:
                raise CollectiveError(f"{what}: {ended}") from error
            seconds_ended += 0.0 if ended is None else _SLICE_SECONDS
            time.sleep(_SLICE_SECONDS)

    def _give_sign(self) -> None:
        if self.step is not None and self._group is not None:
            self._signs += 1
            self._group.publish_status(self._signs)
            self.step.poll(0)

    def _observe(self) -> list[Any]:
        """Last sign of life of each rank; empty outside a guarded step, where ranks give none."""
        return [] if self.step is None or self._group is None else self._group.statuses()

    def _silent_since(self, before: list[Any] | None) -> list[int]:
        if not before or self._group is None:
            return []
        pairs = enumerate(zip(before, self._observe(), strict=True))
        return [rank for rank, (old, new) in pairs if old == new and rank != self._group.rank]

    def _describe(self, what: str, late: list[int]) -> str:
        group = self._group
        if group is None:
            return what
        names = ", ".join(f"rank {rank}" for rank in late[:8]) or "another rank"
        more = f" and {number_of(len(late) - 8, 'other')}" if len(late) > 8 else ""
        return f"{what}: rank {group.rank} waited {group.timeout_seconds:g} s for {names}{more}, in vain"


logger = logging.getLogger(__name__)

GROUP_IS_LOST: Final = (
    "operations of its process group were ended, because they waited for a rank that has failed; what needs no other "
    "rank, such as torch.save(), still works"
)
_WATCH_SECONDS: Final = 0.05
_END_GRACE_SECONDS: Final = 1.0
"""Time for operations that all ranks have issued to end, and for a thread that waits for no GPU to leave."""


def end_stuck(on_gpus: Sequence[TorchCollectives], seconds: float = _END_GRACE_SECONDS) -> None:
    """Ends operations that this rank has issued, after a failure, if they do not end by themselves in some seconds."""
    for collectives in on_gpus:
        if not collectives.is_ended and collectives.end_stuck(seconds):
            logger.warning("rank %d: %s", collectives.rank(), GROUP_IS_LOST)


@contextlib.contextmanager
def freed_from_failures(on_gpus: Sequence[TorchCollectives], check: Callable[[], None], group: Group) -> Iterator[None]:
    """In the block, a failure of another rank frees a thread that waits for a GPU.

    Args:
        on_gpus: collectives whose operations are queued on a GPU; without any, nothing is done.
        check: raises if another rank has failed. Makes no request.
        group: the ranks, which say whose process has ended.
    """
    if not on_gpus or group.size == 1:
        yield
        return
    is_over = threading.Event()

    def has_failed() -> bool:
        try:
            check()
        except (Stopped, CollectiveError, StoreUnreachable):
            return True
        ended_ranks = getattr(group, "ended_ranks", None)
        return ended_ranks is not None and ended_ranks() is not None

    def watch() -> None:
        while not is_over.wait(_WATCH_SECONDS):
            if has_failed():
                # The thread of the program leaves by itself, unless it waits for a GPU.
                if not is_over.wait(_END_GRACE_SECONDS):
                    end_stuck(on_gpus, 0.0)
                return

    thread = threading.Thread(target=watch, name="trackbed-failures", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        # Or the thread, which may be about to end operations, would end those of the next block.
        thread.join()
