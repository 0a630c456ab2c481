"""Ranks that save or load together: they fail together, and send each other bytes.

Success and failure are agreed on through `comm.Group`. Tables go over the backend of the process group, where there is
one, in collectives that each rank enters only after all have met for it, and waits for while it looks for failures of
the others.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Event
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from trackbed.comm import SOLO, Group, Step
from trackbed.comm.torch import TorchGroup, current_group
from trackbed.errors import CheckpointError, CollectiveError

__all__ = ["Meeting", "Ranks", "meet"]

Ranks: TypeAlias = "Group | dist.ProcessGroup | None"
"""The ranks of a save or load: a group, a process group of torch, or None for all of them."""

_INLINE_BYTES: Final = 4 << 10
"""Bytes of each rank up to which they go through the store, without a collective of the backend."""
_POLL_SECONDS: Final = 0.02

_groups: Final[WeakKeyDictionary[Any, TorchGroup]] = WeakKeyDictionary()
_current: Final[ContextVar["Meeting | None"]] = ContextVar("trackbed_checkpoint_meeting", default=None)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Ranks in one save or load."""

    group: Group
    step: Step
    process_group: Any
    """Process group of torch with the same ranks; None if there is none."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def poll(self) -> None:
        """Raises if another rank has failed. Call it every 50 ms or so during long work."""
        self.step.poll(0)

    def gather(self, content: bytes) -> list[bytes]:
        """Collective over the ranks: returns the bytes of each, in rank order."""
        if self.size == 1:
            return [content]
        goes_inline = self.process_group is None or len(content) <= _INLINE_BYTES
        text = base64.b85encode(content).decode() if goes_inline else None
        offers: list[Any] = self.group.all_gather([len(content), text])
        if all(text is not None for _, text in offers):
            return [content if rank == self.rank else base64.b85decode(text) for rank, (_, text) in enumerate(offers)]
        sizes = [size for size, _ in offers]
        padded = np.zeros(max(sizes), dtype=np.uint8)
        padded[: len(content)] = np.frombuffer(content, dtype=np.uint8)
        device = "cuda" if dist.get_backend(self.process_group) == "nccl" else "cpu"
        received = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes]
        self.wait(
            dist.all_gather(received, torch.from_numpy(padded).to(device), group=self.process_group, async_op=True)
        )
        return [tensor[:size].cpu().numpy().tobytes() for tensor, size in zip(received, sizes, strict=True)]

    def broadcast(self, content: bytes) -> bytes:
        """Collective over the ranks: returns the bytes of rank 0; those of the others are ignored."""
        if self.size == 1:
            return content
        goes_inline = self.process_group is None or len(content) <= _INLINE_BYTES
        text = base64.b85encode(content).decode() if goes_inline and self.rank == 0 else None
        size, text = self.group.broadcast([len(content), text])
        if text is not None:
            return content if self.rank == 0 else base64.b85decode(text)
        device = "cuda" if dist.get_backend(self.process_group) == "nccl" else "cpu"
        received = torch.empty(size, dtype=torch.uint8, device=device)
        if self.rank == 0:
            received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.wait(dist.broadcast(received, group=self.process_group, group_src=0, async_op=True))
        return content if self.rank == 0 else received.cpu().numpy().tobytes()

    def wait(self, work: Any) -> None:
        """Waits for a collective of the backend, and looks for failures of other ranks meanwhile."""
        if torch.cuda.is_available():
            work.wait()
            return
        future = work.get_future()
        while not work.is_completed():
            self.poll()
            _sleep_until(future, _POLL_SECONDS)
        work.wait()


def _sleep_until(future: Any, seconds: float) -> None:
    """Sleeps until a future is done, at most for some seconds."""
    event = Event()
    future.add_done_callback(lambda _: event.set())
    event.wait(seconds)


@contextmanager
def meet(
    what: str,
    group: Ranks = None,
    *,
    error_type: type[CheckpointError] = CheckpointError,
) -> Iterator[Meeting]:
    """Collective over the ranks: runs the block as one step, which succeeds or fails on all of them.

    A block inside another one over the same ranks belongs to that one's step.

    Args:
        what: description, with which errors begin.
        group: the ranks, or their process group of torch; by default all processes, or this process alone if
            `torch.distributed` is not initialised.
        error_type: type of the error.

    Raises:
        CheckpointError: a rank failed; the message has the rank, and its error.
    """
    outer = _current.get()
    if outer is not None and (group is None or group is outer.group or group is outer.process_group):
        yield outer
        return
    found, ranks = _ranks(group)
    try:
        with found.guarded(what) as step:
            token = _current.set(Meeting(found, step, ranks))
            try:
                yield Meeting(found, step, ranks)
            finally:
                _current.reset(token)
    except (CheckpointError, CollectiveError) as error:
        if isinstance(error, error_type):
            raise
        raise error_type(str(error)) from error
    except Exception as error:
        msg = f"{what}: rank {found.rank}: {type(error).__name__}: {error}"
        raise error_type(msg) from error


def _ranks(group: Ranks) -> tuple[Group, Any]:
    """Group and process group of the same ranks."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    ranks: Any = world if group is None else group
    if hasattr(ranks, "guarded"):
        return ranks, None
    if ranks is None or ranks.size() == 1:
        return SOLO, None
    if ranks is world:
        return current_group() or SOLO, world
    if ranks not in _groups:
        _groups[ranks] = TorchGroup(ranks)
    return _groups[ranks], ranks
