"""Ranks that save or load together: they fail together, send each other bytes, and time the phases of their work.

Success and failure are agreed on through `comm.Group`. Tables go over the backend of the process group, where there is
one, in collectives that each rank enters only after all have met for it, and waits for while it looks for failures of
the others.
"""

import base64
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from trackbed.cancellation import check_wait
from trackbed.comm import SOLO, Group, Step
from trackbed.comm.rendezvous import Stopped
from trackbed.comm.torch_group import TorchGroup, current_group, device_for
from trackbed.errors import ArgumentError, CheckpointError, CollectiveError
from trackbed.files.publish import remove_partial

Ranks: TypeAlias = Group | dist.ProcessGroup | None
"""The ranks of a save or load: a group, a process group of torch, or None for all of them."""

logger = logging.getLogger(__name__)

_INLINE_BYTES: Final = 16 << 10
"""Bytes of all ranks up to which they go through the store, where each rank reads all of them, and not the backend."""
_POLL_SECONDS: Final = 0.02
_NCCL_POLL_SECONDS: Final = 0.0005

_groups: Final[WeakKeyDictionary[Any, TorchGroup]] = WeakKeyDictionary()
_current: Final[ContextVar["Meeting | None"]] = ContextVar("trackbed_checkpoint_meeting", default=None)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Ranks in one save or load."""

    group: Group
    step: Step
    process_group: Any
    """Process group of torch with the same ranks; None if there is none."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """What this rank does if the step fails, once all ranks have left it."""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    def remove_after_error(self, partial: Path) -> None:
        """Has a partial folder removed if the step fails, once all ranks have left it."""

        def remove() -> None:
            if partial.exists():
                remove_partial(partial)

        self.undo.append(remove)

    def poll(self) -> None:
        """Raises if another rank has failed. Call it every 50 ms or so during long work."""
        self.step.poll(0)
        check_wait()

    def gather(self, content: bytes, among: Any = None) -> list[bytes]:
        """Collective over the ranks: returns the bytes of each, in rank order.

        Args:
            content: bytes of this rank.
            among: process group of some of the ranks, this one among them, that exchange their bytes among themselves;
                the others do so in other groups. None for all.
        """
        if self.size == 1:
            return [content]
        members = range(self.size) if among is None else self._ranks_of(among)
        offers = self._offer(content)
        inline = _inline_of(offers)
        if inline is not None:
            return [content if rank == self.rank else inline[rank] for rank in members]
        group = self.process_group if among is None else among
        sizes = [offers[rank].size for rank in members]
        mine = _padded(content, max(sizes), device_for(group))
        received = [torch.empty_like(mine) for _ in sizes]
        self.wait(dist.all_gather(received, mine, group=group, async_op=True))
        return _cut(received, sizes)

    def gather_to_first(self, content: bytes, note: bytes = b"") -> tuple[list[bytes], list[bytes]]:
        """Collective over the ranks: sends bytes of each to rank 0, and a few bytes of each to all.

        Args:
            content: bytes of this rank.
            note: the few bytes.

        Returns:
            The bytes of each rank, in rank order; on ranks other than 0, nothing. And the few bytes of each rank.
        """
        if self.size == 1:
            return [content], [note]
        offers = self._offer(content, note)
        notes, inline = [offer.note for offer in offers], _inline_of(offers)
        if inline is not None:
            return inline if self.rank == 0 else [], notes
        sizes = [offer.size for offer in offers]
        mine = _padded(content, max(sizes), device_for(self.process_group))
        received = [torch.empty_like(mine) for _ in sizes] if self.rank == 0 else None
        self.wait(dist.gather(mine, received, group=self.process_group, group_dst=0, async_op=True))
        return _cut(received or [], sizes), notes

    def _offer(self, content: bytes, note: bytes = b"") -> list["_Offer"]:
        """Collective over the ranks: returns what each has to send, and its bytes if all of them may be few."""
        is_short = self.size * len(content) <= _INLINE_BYTES
        text = _text_of(content) if self.process_group is None or is_short else None
        found = self.group.all_gather([len(content), text, _text_of(note)])
        return [
            _Offer(size, None if text is None else base64.b85decode(text), base64.b85decode(note))
            for size, text, note in found
        ]

    def broadcast(self, content: bytes, source: int = 0) -> bytes:
        """Collective over the ranks: returns the bytes of one of them; those of the others are ignored.

        Args:
            content: bytes of this rank.
            source: number of the rank that sends.
        """
        if self.size == 1:
            return content
        is_short = len(content) <= _INLINE_BYTES // 4
        is_source = self.rank == source
        text = _text_of(content) if is_source and (self.process_group is None or is_short) else None
        size, text = self.group.broadcast([len(content), text], source=source)
        if text is not None:
            return content if is_source else base64.b85decode(text)
        device = device_for(self.process_group)
        received = torch.empty(size, dtype=torch.uint8, device=device)
        if is_source:
            received.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        self.wait(dist.broadcast(received, group=self.process_group, group_src=source, async_op=True))
        return content if is_source else received.cpu().numpy().tobytes()

    def has(self, process_group: Any) -> bool:
        """True if all ranks of a process group belong to this meeting."""
        if self.process_group is None:
            return False
        own = dist.get_process_group_ranks(self.process_group)
        return set(dist.get_process_group_ranks(process_group)) <= set(own)

    def _ranks_of(self, process_group: Any) -> list[int]:
        """Numbers, in this meeting, of the ranks of a process group."""
        own = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(self.process_group))}
        return [own[rank] for rank in dist.get_process_group_ranks(process_group)]

    def wait(self, work: Any) -> None:
        """Waits for a collective of the backend, and looks for failures of other ranks meanwhile."""
        future = work.get_future()
        while not work.is_completed():
            self.poll()
            if future.done():  # NCCL's is done once the operation is queued
                time.sleep(_NCCL_POLL_SECONDS)
            else:
                _sleep_until(future, _POLL_SECONDS)
        work.wait()


class _Offer(NamedTuple):
    """Size of the bytes that a rank has for a gather, and the bytes if they are few."""

    size: int
    content: bytes | None
    """None if it goes over the backend."""
    note: bytes


def _inline_of(offers: list[_Offer]) -> list[bytes] | None:
    """Bytes of all ranks, if none goes over the backend."""
    contents = [offer.content for offer in offers if offer.content is not None]
    return contents if len(contents) == len(offers) else None


def _text_of(content: bytes) -> str:
    return base64.b85encode(content).decode()


def _padded(content: bytes, size: int, device: torch.device) -> torch.Tensor:
    """Bytes as a tensor of some length, which is the same on all ranks."""
    padded = np.zeros(size, dtype=np.uint8)
    padded[: len(content)] = np.frombuffer(content, dtype=np.uint8)
    return torch.from_numpy(padded).to(device)


def _cut(received: list[torch.Tensor], sizes: list[int]) -> list[bytes]:
    pairs = zip(received, sizes, strict=False)  # nothing is received by others than rank 0
    return [tensor[:size].cpu().numpy().tobytes() for tensor, size in pairs]


def _sleep_until(future: Any, seconds: float) -> None:
    """Sleeps until a future is done, at most for some seconds."""
    event = Event()
    future.add_done_callback(lambda _: event.set())
    event.wait(seconds)


def current_meeting() -> Meeting | None:
    """The meeting of the innermost `meet` that this thread is in; None outside of one."""
    return _current.get()


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
        error_type: type of the error; where it has `caused_by`, that makes it from the text and this rank's exception.

    Raises:
        CheckpointError: a rank failed; the message has the rank, and its error.
        ArgumentError: this process does not belong to the group.
    """
    outer = _current.get()
    if outer is not None and (group is None or group is outer.group or group is outer.process_group):
        yield outer
        return
    members, ranks = _ranks(group)
    make: Callable[[str, Exception | None], CheckpointError]
    make = getattr(error_type, "caused_by", lambda text, _: error_type(text))
    cause: Exception | None = None
    try:
        # The step ends when all ranks have left it.
        with _undone_after_error() as undo, members.guarded(what) as step:
            meeting = Meeting(members, step, ranks, undo)
            token = _current.set(meeting)
            try:
                yield meeting
            except Exception as error:
                cause = None if isinstance(error, Stopped) else error
                raise
            finally:
                _current.reset(token)
    except CollectiveError as error:
        raise make(str(error), cause) from error
    except Exception as error:  # one process alone raises what it is
        raise make(f"{what}: rank {members.rank}: {type(error).__name__}: {error}", error) from error


@contextmanager
def _undone_after_error() -> Iterator[list[Callable[[], None]]]:
    """Yields a list of functions, which are called if the block fails."""
    undo: list[Callable[[], None]] = []
    try:
        yield undo
    except BaseException:
        for function in undo:
            try:
                function()
            except OSError as error:  # a rank that was given up may still write
                logger.warning("what a failed save has left must be removed, but: %s", error)
        raise


@contextmanager
def meet_among(
    what: str, process_group: Any, *, error_type: type[CheckpointError] = CheckpointError
) -> Iterator[Meeting]:
    """Like `meet`; a block inside one over more ranks belongs to that one's step, with all of its ranks."""
    outer = _current.get()
    if outer is not None and process_group is not None and outer.has(process_group):
        yield outer
        return
    with meet(what, process_group, error_type=error_type) as meeting:
        yield meeting


def _ranks(group: Ranks) -> tuple[Group, Any]:
    """Group and process group of the same ranks."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    ranks: Any = world if group is None else group
    if hasattr(ranks, "guarded"):
        return ranks, None
    if isinstance(ranks, int) and world is not None:  # torch gives a number to ranks that are not members
        raise ArgumentError(f"process_group: this process must belong to it, but rank {dist.get_rank()} does not")
    if ranks is not None and not callable(getattr(ranks, "size", None)):
        raise ArgumentError(
            f"group: must be a process group of torch, a comm.Group or None, but is of {type(ranks).__name__}"
        )
    if ranks is None or ranks.size() == 1:
        return SOLO, None
    if ranks is world:
        return current_group() or SOLO, world
    if ranks not in _groups:
        _groups[ranks] = TorchGroup(ranks)
    return _groups[ranks], ranks


Observer = Callable[[str, float], None]
"""Called with the name of a phase, and its seconds."""


class Phases:
    """Times phases.

    Args:
        observe: called after each phase; None for no one.
    """

    def __init__(self, observe: Observer | None) -> None:
        self._observe = observe

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Times the block, unless it fails."""
        start = time.perf_counter()
        yield
        if self._observe is not None:
            self._observe(name, time.perf_counter() - start)
