"""Requests to save, which a program executes later, and their writes of a rank's files, in any process of its host.

Names are Megatron Core 0.16.1's.
"""

import atexit
import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch

from trackbed.checkpoint.background.priority import lower_priority
from trackbed.checkpoint.background.slab import Slab
from trackbed.checkpoint.io.targets import data_name
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.checkpoint.ranks import Meeting, current_meeting, meet
from trackbed.checkpoint.save import write_shards
from trackbed.daemon_threads import DaemonThreads
from trackbed.errors import CheckpointError
from trackbed.files.publish import write_new
from trackbed.megatron.checkpoints.checkpoint_error import DistributedCheckpointError
from trackbed.plural import number_of

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.02
_open_queues: Final["WeakSet[AsyncCallsQueue]"] = WeakSet()


class AsyncRequest(NamedTuple):
    """Save that has been prepared."""

    async_fn: Callable[..., Any] | None
    """Writes this rank's files, without any other rank and in any process; None if there is nothing to write."""
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    """Called in order once all ranks have written theirs."""
    async_fn_kwargs: dict[str, Any] = {}  # noqa: RUF012  Megatron Core's default, which nothing changes
    preload_fn: Callable[[], Any] | None = None
    """Makes the second argument of `async_fn`."""
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Adds a function to be called last.

        Raises:
            RuntimeError: the request is frozen.
        """
        if self.is_frozen:
            raise RuntimeError("AsyncRequest: must not be frozen when a function is added, but is")
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Collective over all ranks: makes the save, and returns when it is complete.

        Raises:
            CheckpointError: a rank failed.
        """
        with meet("save", error_type=DistributedCheckpointError) as meeting:
            arguments = list(self.async_fn_args)
            if self.preload_fn is not None and not getattr(self.async_fn, "reads_tensors_in_place", False):
                arguments[1] = self.preload_fn()
            if self.async_fn is not None:
                self.async_fn(*arguments, **self.async_fn_kwargs)
            for call in self.finalize_fns:
                meeting.group.barrier()  # all ranks have done what this function may rely on
                call()

    def freeze(self) -> "AsyncRequest":
        """Returns the request, to which no function can be added."""
        return self._replace(is_frozen=True)


@dataclass(slots=True)
class _Call:
    """Request that is being executed."""

    request: AsyncRequest
    future: "Future[None]"
    slab: Slab
    """Memory of the copies that are written."""


class AsyncCallsQueue:
    """Executes requests in order, on a thread, while training goes on.

    The tensors of a request are copied when it is scheduled, and may be overwritten afterwards.

    Args:
        persistent: ignored: no worker process is used.
    """

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent
        self.call_idx = -1
        self._calls: deque[_Call] = deque()
        self._free_slabs: list[Slab] = []
        self._thread: DaemonThreads | None = None

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Collective over all ranks: begins to execute a request.

        Args:
            async_request: request, or one of an older version with the same names of fields.

        Returns:
            Number of the request.

        Raises:
            CheckpointError: on every rank: its tensors cannot be copied.
        """
        request = AsyncRequest(**async_request._asdict()).freeze()._replace(call_idx=self.call_idx + 1)
        slab = self._free_slabs.pop() if self._free_slabs else Slab()
        with meet("save", error_type=DistributedCheckpointError) as meeting:
            _removed_with(meeting, request)
            arguments = list(request.async_fn_args)
            values = getattr(request.async_fn, "values", None)
            if values is not None:
                arguments[1] = slab.copies_of(values, meeting.poll)
            elif request.preload_fn is not None:
                arguments[1] = request.preload_fn()
        if self._thread is None:
            self._thread = DaemonThreads("trackbed saves")
            self._thread.submit(lower_priority)
            _open_queues.add(self)
        function, options = request.async_fn, request.async_fn_kwargs

        def execute() -> None:
            if function is not None:
                function(*arguments, **options)
            arguments.clear()  # so that the copies are not used when the slab is used again

        self.call_idx += 1
        self._calls.append(_Call(request, self._thread.submit(execute), slab))
        return self.call_idx

    def maybe_finalize_async_calls(
        self,
        blocking: bool = False,
        no_dist: bool = False,
    ) -> list[int]:
        """Collective over all ranks: completes requests that all ranks have executed, in order.

        Without requests it returns at once. All ranks complete a request in the same call, so the functions that a
        program has added to it may be collective.

        Args:
            blocking: True to wait for all requests.
            no_dist: ignored: the ranks always agree.

        Returns:
            Numbers of the requests that are complete now.

        Raises:
            CheckpointError: on every rank: one has failed. The request is given up.
        """
        finalized = []
        while self._calls:
            with meet("save", error_type=DistributedCheckpointError) as meeting:
                future = self._calls[0].future
                while blocking and not future.done():
                    meeting.poll()
                    wait([future], _POLL_SECONDS)
                are_done = all(meeting.group.all_gather(future.done()))
            if not are_done:
                break
            call = self._calls.popleft()
            try:
                _finalize(call)
            finally:
                self._free_slabs.append(call.slab)
            finalized.append(call.request.call_idx)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Number of requests that are not complete yet."""
        return len(self._calls)

    def wait_for_thread(self) -> None:
        """Waits, at the end of the program, for what is being written. It is complete only if it was finalized."""
        for call in self._calls:
            call.future.exception()
        if self._calls:
            logger.warning(
                "checkpoint: maybe_finalize_async_calls must complete %s before the program ends, but has not: nothing "
                "has been saved",
                number_of(len(self._calls), "asynchronous save"),
            )

    def close(self, abort: bool = False) -> None:
        """Collective over all ranks: completes all requests, and gives the memory back.

        Args:
            abort: True to give them up instead, which is not collective. What a thread is writing stays in a partial
                folder.
        """
        if abort:
            self._calls.clear()
        else:
            self.maybe_finalize_async_calls(blocking=True)
        self._free_slabs.clear()


def _finalize(call: _Call) -> None:
    """Collective over all ranks: calls the last functions of a request."""
    with meet("save", error_type=DistributedCheckpointError) as meeting:
        _removed_with(meeting, call.request)
        call.future.result()
        for function in call.request.finalize_fns:
            meeting.group.barrier()  # all ranks have done what this function may rely on
            function()


def _removed_with(meeting: Meeting, request: AsyncRequest) -> None:
    """Has the partial folder of a request removed if the meeting fails."""
    partial = getattr(request.async_fn, "partial", None)
    if meeting.rank == 0 and isinstance(partial, Path):
        meeting.remove_after_error(partial)


def _wait_for_threads() -> None:
    """Waits for the threads of all queues at the end of the program."""
    for queue in list(_open_queues):
        queue.wait_for_thread()


getattr(threading, "_register_atexit", atexit.register)(_wait_for_threads)
os.register_at_fork(after_in_child=_open_queues.clear)  # whose threads a forked process does not have


_DONE = b"+"
_FAILED = b"-"


class FileWrite:
    """Writes one rank's files when it is called. Can be called in a forked process, and sent to another as a pickle.

    What was written is kept here, or where another process has written it, in a file that `result` reads and removes.

    Args:
        folder: folder of the files.
        values: values that the rank writes.
        rank: number of the rank.
    """

    reads_tensors_in_place = True
    """True: in this process, `async_fn` needs no copies of the tensors from `preload_fn`."""

    def __init__(self, folder: Path, values: Sequence[torch.Tensor | bytes], rank: int) -> None:
        self._folder = folder
        self._values = values
        self._process = os.getpid()
        self._result_path = folder / f".{data_name(rank)}.{uuid.uuid4().hex}"
        self._written: WrittenFiles | None = None

    @property
    def values(self) -> Sequence[torch.Tensor | bytes]:
        """What the rank writes, where it lies."""
        return self._values

    def __call__(self, rank: int, values: Sequence[torch.Tensor | bytes] | None, names: Sequence[str]) -> None:
        """Writes the files.

        Args:
            rank: number of the rank.
            values: result of `staged`; None for the values where they lie.
            names: name of the file of each value.
        """
        values = self._values if values is None else values
        if os.getpid() == self._process:
            meeting = current_meeting()
            polls = () if meeting is None else (meeting.poll,)
            self._written = write_shards(self._folder, values, names, *polls, direct=True)
            return
        torch.set_num_threads(1)  # a forked process lacks the threads that torch has started
        try:
            content = _DONE + write_shards(self._folder, values, names, direct=True).encode()
        except Exception as error:
            text = f"rank {rank}: {type(error).__name__}: {error}"
            write_new(self._result_path, _FAILED + text.encode())
            raise
        write_new(self._result_path, content)

    def needs_staging(self) -> bool:
        """True if tensors lie where a forked process cannot read them."""
        return any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in self._values)

    def staged(self) -> list[torch.Tensor | bytes]:
        """Copies of the values in the memory of the host."""
        return [value if isinstance(value, bytes) else value.to("cpu", copy=True) for value in self._values]

    def result(self) -> WrittenFiles:
        """Returns the report of the written files, once."""
        if self._written is not None:
            return self._written
        if not self._result_path.exists():
            raise CheckpointError(
                f"{self._folder}: async_fn must have returned before finalize_fns are called, but has written no "
                "result: see what its process has logged, and save again"
            )
        content = self._result_path.read_bytes()
        self._result_path.unlink()
        if content[:1] != _DONE:
            raise CheckpointError(
                f"{self._folder}: async_fn must have written the files, but failed: {content[1:].decode()}"
            )
        self._written = WrittenFiles.decode(content[1:])
        return self._written

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with copies of the tensors: a view would take all of its storage with it."""
        return {**vars(self), "_values": self.staged(), "_written": None, "_process": None}


class InPartialFolder:
    """An `async_fn` that writes to a partial folder, which is removed if it fails in a step of all ranks.

    Args:
        function: the function, which can be sent as a pickle.
        partial: the folder.
    """

    def __init__(self, function: Any, partial: Path) -> None:
        self._function = function
        self.partial = partial

    @property
    def reads_tensors_in_place(self) -> bool:
        """See `FileWrite`."""
        return bool(getattr(self._function, "reads_tensors_in_place", False))

    @property
    def values(self) -> Any:
        """What a `FileWrite` writes; None for another function."""
        return getattr(self._function, "values", None)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls the function."""
        meeting = current_meeting()
        if meeting is not None and meeting.rank == 0:
            meeting.remove_after_error(self.partial)
        return self._function(*arguments, **options)
