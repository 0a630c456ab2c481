"""Collectives of a process group of `torch.distributed`, on any device."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trackbed.comm.torch_group import abort_backend, backends_of, device_for
from trackbed.errors import CollectiveError
from trackbed.grads.collectives.fp32_accumulation import receive_shards
from trackbed.grads.collectives.protocol import (
    DONE,
    MAX_NUMBERS,
    NO_LABEL,
    BackendError,
    Exchange,
    Label,
    Work,
    check_places,
    shard_of,
)


def dist_reduce_scatter_func(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  torch's signature
    op: Any = None,
    group: Any = None,
    async_op: bool = False,  # noqa: FBT001, FBT002  torch's signature
) -> Any:
    """Calls torch's reduce-scatter of one tensor, under the name that the installed version has for it."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(output, input, op=dist.ReduceOp.SUM if op is None else op, group=group, async_op=async_op)


def dist_all_gather_func(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  torch's signature
    group: Any = None,
    async_op: bool = False,  # noqa: FBT001, FBT002  torch's signature
) -> Any:
    """Calls torch's all-gather of one tensor, under the name that the installed version has for it."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(output, input, group=group, async_op=async_op)


logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.01
_ABORT_SECONDS: Final = 3.0
_ROW: Final = len(NO_LABEL) + MAX_NUMBERS + 2
"""Numbers that a rank sends in an exchange: its label, numbers, and those of its user and the operation.

Ranks at different exchanges must send as many."""
_MOST_USERS: Final = 1 << 32
_REDUCE_SCATTER: Final = dist_reduce_scatter_func


def is_replaced() -> bool:
    """True if a program has put its own function in the place of `dist_reduce_scatter_func`, as tests do."""
    return dist_reduce_scatter_func is not _REDUCE_SCATTER


class TorchCollectives:
    """Collectives of a torch process group. See `Collectives`.

    An all-reduce adds in the order of the backend. A reduce-scatter adds in float32 and in the order of `Collectives`,
    on a GPU only with `fp32_accumulation`.

    Args:
        process_group: process group.
        fp32_accumulation: True to add in float32 on a GPU too.
        device: device of the buffers, from which a group without a backend for the CPU sends other tensors, too.
        user: number of these among all that exchange numbers over the process group, at least 1.
    """

    def __init__(
        self,
        process_group: Any,
        *,
        fp32_accumulation: bool = False,
        device: torch.device | None = None,
        user: int = 1,
    ) -> None:
        self._group = process_group
        self._fp32_accumulation = fp32_accumulation
        self._device = device
        self._num_issued = 0
        self._user = user
        self._last: Sequence[Any] = ()
        """Works of the last operation on a GPU."""
        self._ending = threading.Lock()
        self.is_ended = False
        """True once its operations were ended because they never would."""

    def rank(self) -> int:
        """Number of this rank in the process group."""
        return int(self._group.rank())

    def size(self) -> int:
        """Number of ranks in the process group."""
        return int(self._group.size())

    def num_issued(self) -> int:
        """Number of operations that were given to torch."""
        return self._num_issued

    def all_reduce(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Replaces each buffer by the sum over all ranks."""
        self._begin()
        _scale(buffers, scale)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        sent = _uncounted(buffers)
        with self._coalesced(sent) as coalesced:
            works = [dist.all_reduce(buffer, op=op, group=self._group, async_op=True) for buffer in sent]
        return self._issued(_works_of(works, coalesced), sent[0].device)

    def reduce_scatter(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        scale: float,
        average: bool,
        label: Label,
    ) -> Work:
        """Replaces this rank's shard of each buffer by the sum over all ranks."""
        self._begin()
        _scale(buffers, scale)
        sent = _uncounted(buffers)
        shards = [shard_of(buffer, self.rank(), self.size()) for buffer in sent]
        device = sent[0].device
        # The reduce-scatter of gloo takes as long as three all-reduces, and its work has no timeout.
        if (self._fp32_accumulation or self._waits_on_host(device)) and not is_replaced():
            divisor = self.size() if average else 1
            received = [
                receive_shards(shard, buffer, self._group, divisor=divisor)
                for shard, buffer in zip(shards, sent, strict=True)
            ]
            return self._issued(received, device)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        with self._coalesced(sent) as coalesced:
            works = [
                dist_reduce_scatter_func(shard, buffer, op=op, group=self._group, async_op=True)
                for shard, buffer in zip(shards, sent, strict=True)
            ]
        return self._issued(_works_of(works, coalesced), device)

    def all_gather(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        label: Label,
    ) -> Work:
        """Replaces each shard of each buffer by that of the rank that owns it."""
        self._begin()
        sent = _uncounted(buffers)
        with self._coalesced(sent) as coalesced:
            works = [
                dist_all_gather_func(
                    buffer, shard_of(buffer, self.rank(), self.size()), group=self._group, async_op=True
                )
                for buffer in sent
            ]
        return self._issued(_works_of(works, coalesced), sent[0].device)

    def exchange(
        self, numbers: npt.NDArray[np.int64], *, label: Label = NO_LABEL, more: torch.Tensor | None = None
    ) -> Exchange:
        """Sends a few numbers to all ranks, and the label before them, always as many."""
        size, num_known = self.size(), len(label) + len(numbers)
        num_sent = num_known + (0 if more is None else len(more))
        self._begin()
        device = device_for(self._group, near=self._device)
        # On the GPU, if gradients are reduced there: the host waits for no other rank then.
        if self._device is not None and self.is_queued():
            device = self._device
        mark = self._user, self._num_issued
        row = [*label, *numbers.tolist(), *[0] * (_ROW - num_known - len(mark)), *mark]
        mine = torch.tensor(row, dtype=torch.int64, pin_memory=device.type == "cuda" and torch.cuda.is_available())
        mine = mine.to(device, non_blocking=True)  # a copy from memory that is not pinned would wait for the GPU
        if more is not None:
            mine = torch.cat([mine[:num_known], more.to(device), mine[num_sent:]])
        received = torch.empty(size * _ROW, dtype=torch.int64, device=device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(received, mine, group=self._group, async_op=True)
        own = self.rank()

        def decode(read: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            rows = read.reshape(size, _ROW)
            _check_rows(rows, own, label, mark)
            return rows[:, len(label) : num_sent]

        return Exchange(self._issued([work], device), decode, received)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int) -> Work:
        """Replaces the tensors by those of rank `source`."""
        self._begin()
        kinds = backends_of(self._group)
        on_host: list[Any] = []
        queued: list[Any] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            own = tensor.detach()
            # gloo sends tensors with gaps in another order, and a group may have no backend for the tensor's device.
            content = own.contiguous()
            if own.device.type not in kinds:
                content = content.to(device_for(self._group, near=self._device))
            if content is not own:
                copies.append((own, content))
            as_bytes = content.as_strided((content.numel(),), (1,)).view(torch.uint8)  # backends lack some types
            work = dist.broadcast(as_bytes, group=self._group, group_src=source, async_op=True)
            if work is not None:
                (on_host if self._waits_on_host(content.device) else queued).append(work)
        for work in queued:
            work.wait()  # the current stream does: this returns at once
        self._last = queued or self._last
        if on_host:
            return TorchWork(on_host, copies)
        for target, content in copies:
            target.copy_(content)
        return DONE

    def is_queued(self) -> bool:
        """True if operations on gradients are queued on a GPU, where one that never ends keeps all later work."""
        return self._device is not None and not self._waits_on_host(self._device)

    def end_stuck(self, seconds: float) -> bool:
        """Ends the operations of the process group if those that this rank has issued take longer than some seconds.

        Returns:
            True if they were ended, after which the process group is of no more use.
        """
        if self._device is None or not self.is_queued():
            return False
        if not self._ending.acquire(timeout=seconds + _ABORT_SECONDS):
            return False  # another thread is about to end them
        try:
            deadline = time.monotonic() + seconds
            while not self.is_ended and not self._is_over():
                if time.monotonic() >= deadline:
                    self.is_ended = True
                    return self._abort()
                time.sleep(_POLL_SECONDS)
        finally:
            self._ending.release()
        return False

    def _is_over(self) -> bool:
        """True if the last operation is over, also if it has failed."""
        with contextlib.suppress(Exception):  # of any class, as the backend has it
            return all(work.is_completed() for work in self._last)
        return True

    def _abort(self) -> bool:
        """Aborts the backend, on a thread that this one leaves behind if that hangs: the failure must be told."""
        is_done = threading.Event()

        def abort() -> None:
            try:
                abort_backend(self._group, self._device)  # type: ignore[arg-type]
                is_done.set()
            except Exception:  # it must not replace the error that has ended the step
                logger.exception("rank %d: its operations on the GPU could not be ended", self.rank())

        thread = threading.Thread(target=abort, name="trackbed-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)
        if thread.is_alive():
            logger.warning("rank %d: its operations on the GPU have not ended in %g s", self.rank(), _ABORT_SECONDS)
        return is_done.is_set()

    def _issued(
        self,
        works: Sequence[Any],
        device: torch.device,
    ) -> Work:
        works = [work for work in works if work is not None]
        if not works:
            return DONE
        waits_on_host = self._waits_on_host(device)
        if not waits_on_host:
            self._last = works  # which are carried out after all before
        return TorchWork(works, waits_on_host=waits_on_host)

    def _waits_on_host(self, device: torch.device) -> bool:
        """True if the host waits for operations on this device; False if a stream of a GPU does."""
        return device.type == "cpu" or backends_of(self._group).get(device.type) == "gloo"

    def _begin(self) -> None:
        """Begins an operation."""
        if self.is_ended:
            raise CollectiveError(
                "torch.distributed: the process group must be whole, but its operations were ended after a failure"
            )
        try:
            dist.get_backend(self._group)
        except (ValueError, RuntimeError) as error:
            raise CollectiveError(
                "torch.distributed: the process group must exist until training has ended, but was destroyed"
            ) from error
        self._num_issued += 1

    def _coalesced(self, buffers: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
        """Sends the operations of several buffers of one type on a GPU as one."""
        if len(buffers) < 2 or len({buffer.dtype for buffer in buffers}) > 1:
            return contextlib.nullcontext()
        if backends_of(self._group).get(buffers[0].device.type) != "nccl":
            return contextlib.nullcontext()  # the others cannot
        manager: Any = dist.distributed_c10d._coalescing_manager
        return manager(self._group, buffers[0].device, async_ops=True)  # type: ignore[no-any-return]


class TorchWork:
    """Works of `torch.distributed` as one. See `Work`.

    Args:
        works: at least one object with `wait` and `is_completed`.
        copies: tensors that are to be replaced at the end, each with what was received for it.
        waits_on_host: False if waiting makes the current stream of a GPU wait, and returns at once.
    """

    def __init__(
        self,
        works: Sequence[Any],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        *,
        waits_on_host: bool = True,
    ) -> None:
        self.works = list(works)
        self._waits_on_host = waits_on_host
        self._copies = list(copies)

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for all works."""
        for work in tuple(self.works):
            if not self._wait_for(work, seconds):
                return False
            with contextlib.suppress(ValueError):  # another thread has waited too
                self.works.remove(work)
        while self._copies:
            target, content = self._copies.pop()
            target.copy_(content)
        return True

    def _wait_for(self, work: Any, seconds: float | None) -> bool:
        if self._waits_on_host and seconds is not None and not work.is_completed():
            # A wait that times out raises the same type of error as one for a work that fails.
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=seconds))
            if not work.is_completed():
                return False
        try:
            work.wait()
        except RuntimeError as error:
            raise BackendError(f"torch.distributed: {str(error).partition(chr(10))[0]}") from error
        return True

    def is_done(self) -> bool:
        """True if all works are over, and nothing is left to be copied."""
        return not self._copies and all(work.is_completed() for work in self.works)

    def on_done(self, call: Callable[[], None]) -> None:
        """Calls `call` when the last work is over, on a thread of torch."""
        self.works[-1].get_future().add_done_callback(lambda _: call())

    def late_ranks(self) -> list[int]:
        """No rank: torch does not say."""
        return []


def _check_rows(rows: npt.NDArray[np.int64], own: int, label: Label, mark: tuple[int, int]) -> None:
    """Checks that what was received in an exchange is what all ranks have sent in it.

    A read from a GPU does not tell that the exchange has failed: what lies there may be from an earlier one.

    Args:
        rows: `[ranks, _ROW]` numbers that were received.
        own: number of this rank.
        label: label that this rank has sent.
        mark: numbers of the user of the process group and of its operation, that this rank has sent.

    Raises:
        BackendError: they were not received.
        CollectiveError: ranks are at different operations.
    """
    marks = list(map(tuple, rows[:, -len(mark) :].tolist()))
    labels = [Label(step, bucket) for step, bucket in rows[:, : len(label)].tolist()]
    if marks[own] != mark or labels[own] != label:
        raise BackendError("torch.distributed: an exchange of the ranks was not carried out")
    for rank, (user, number) in enumerate(marks):
        if not (0 < user < _MOST_USERS and number > 0):
            raise BackendError(f"torch.distributed: what rank {rank} has sent in an exchange did not arrive")
    check_places(own, [("reduction", found) for found in labels])
    for rank, (user, number) in enumerate(marks):
        if (user, number) != mark:
            other = "one of another wrapper" if user != mark[0] else f"number {number} of this wrapper"
            raise CollectiveError(
                "gradients: all ranks must be at the same operation of their process group, but rank "
                f"{rank} is at {other}, and rank {own} at number {mark[1]}"
            )


def _scale(buffers: Sequence[torch.Tensor], scale: float) -> None:
    if scale != 1.0:
        for buffer in buffers:
            buffer *= scale


def _uncounted(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The buffers without the counter of their changes, as what arrives is no change of the program's.

    gloo copies what it has received for a GPU into the buffer, which torch would count.
    """
    return [buffer.data for buffer in buffers]


def _works_of(works: list[Any], coalesced: Any) -> list[Any]:
    # The manager of coalesced operations has a work of all of them, but is none itself.
    return works if coalesced is None else list(coalesced.works)
