"""Requests to save, which a program executes later, and their writes of a rank's files, in any process of its host.

Names are Megatron Core 0.16.1's.
"""

import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trackbed.checkpoint.folder import data_name
from trackbed.checkpoint.io.written_files import WrittenFiles
from trackbed.checkpoint.ranks import current_meeting, meet
from trackbed.checkpoint.save import write_shards
from trackbed.errors import CheckpointError
from trackbed.files.publish import write_new
from trackbed.megatron.checkpoints.checkpoint_error import DistributedCheckpointError

logger = logging.getLogger(__name__)


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


class AsyncCallsQueue:
    """Executes requests, in order. A request is complete when `schedule_async_request` returns.

    Args:
        persistent: ignored: no worker process is used.
    """

    def __init__(self, persistent: bool = False) -> None:
        self.persistent = persistent
        self.call_idx = -1
        self._complete: deque[int] = deque()

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Collective over all ranks: makes a save.

        Args:
            async_request: request, or one of an older version with the same names of fields.

        Returns:
            Number of the request.

        Raises:
            CheckpointError: a rank failed.
        """
        if self.call_idx < 0:
            logger.warning("checkpoint: an asynchronous save is made at once, and training waits for it")
        self.call_idx += 1
        request = AsyncRequest(**async_request._asdict()).freeze()
        request._replace(call_idx=self.call_idx).execute_sync()
        self._complete.append(self.call_idx)
        return self.call_idx

    def maybe_finalize_async_calls(
        self,
        blocking: bool = False,
        no_dist: bool = False,
    ) -> list[int]:
        """Numbers of the requests that have become complete since the last call."""
        found = list(self._complete)
        self._complete.clear()
        return found

    def get_num_unfinalized_calls(self) -> int:
        """Number of requests that `maybe_finalize_async_calls` has not returned yet."""
        return len(self._complete)

    def close(self, abort: bool = False) -> None:
        """Forgets the requests."""
        self._complete.clear()


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
        self._partial = partial

    @property
    def reads_tensors_in_place(self) -> bool:
        """See `FileWrite`."""
        return bool(getattr(self._function, "reads_tensors_in_place", False))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls the function."""
        meeting = current_meeting()
        if meeting is not None and meeting.rank == 0:
            meeting.partials.append(self._partial)
        return self._function(*arguments, **options)
