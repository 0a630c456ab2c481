"""Requests to save, which a program executes later. Names are Megatron Core 0.16.1's."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from trackbed.checkpoint.ranks import meet
from trackbed.megatron.checkpoints.errors import DistributedCheckpointError

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
