"""The thread that writes the record of a run, and meets the threads of the other ranks."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from trackbed.comm import Group
from trackbed.daemon_threads import DaemonThreads
from trackbed.ledger.lines import LineFile
from trackbed.ledger.record import BEGIN, EVENTS, STEPS
from trackbed.ledger.share import line_of, share_of
from trackbed.loading.sample_hashes import SampleHashes

logger = logging.getLogger(__name__)

_MOST_PENDING: Final = 256
"""Steps that may wait for the thread."""
_POLL_SECONDS: Final = 0.1
"""Longest wait without looking at signals."""

Loss = float | Sequence[float] | torch.Tensor
"""Loss of this rank's samples together, or of each of them."""


class Observer(Protocol):
    """Something that is told of a run: each line of its record, on a thread of rank 0."""

    def on_step(self, line: Mapping[str, Any]) -> None:
        """A step has ended; `line` is that of `steps.jsonl`."""
        ...

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Something has happened; `event` is a line of `events.jsonl`."""
        ...

    def close(self) -> None:
        """The run is closed."""
        ...


class RunFiles:
    """Files of a run, to which rank 0 appends."""

    def __init__(self, folder: Path, observers: Sequence[Observer]) -> None:
        self.events = LineFile(folder / EVENTS)
        try:
            self.steps = LineFile(folder / STEPS)
        except BaseException:
            self.events.close()
            raise
        self._observers = list(observers)

    def add_step(self, line: dict[str, Any]) -> None:
        """Appends a step."""
        self.steps.append(line)
        self._tell(lambda one: one.on_step(line))

    def add_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Appends an event, durably, behind the steps before it."""
        event = {"event": kind, "time": round(time.time(), 3), **fields}
        self.events.append(event)
        self.events.flush()
        self._tell(lambda one: one.on_event(event))

    def begin(self, after_step: int, fields: Mapping[str, Any]) -> None:
        """Appends the event that lines of steps behind `after_step` are those of this job from here on."""
        self.add_event(BEGIN, {"after_step": after_step, "steps_bytes": self.steps.size_bytes, **fields})

    def close(self) -> None:
        """Closes the files."""
        self._tell(lambda one: one.close())
        self.steps.close()
        self.events.close()

    def _tell(self, call: Callable[[Observer], None]) -> None:
        """Calls all observers. One that fails is told no more, and training goes on."""
        for one in list(self._observers):
            try:
                call(one)
            except Exception:
                logger.exception("%r has failed, and is told no more of the run", one)
                self._observers.remove(one)


class Recorder:
    """Has steps and events written on a thread, in their order.

    Args:
        group: the ranks. Their threads meet in it, and no one else may.
        files: the files, on rank 0; None on the others.
    """

    def __init__(self, group: Group, files: RunFiles | None) -> None:
        self._group = group
        self._files = files
        self._thread = DaemonThreads("trackbed-ledger")
        self._pending: deque[Future[None]] = deque()
        self._error: BaseException | None = None

    def step(
        self, number: int, batches: Sequence[SampleHashes], loss: Loss, num_ranks: int, fields: dict[str, Any]
    ) -> None:
        """Has the line of a step written, of the shares of all ranks.

        Raises:
            Exception: a line before could not be written.
        """
        own = loss.detach().clone() if isinstance(loss, torch.Tensor) and loss.device.type != "cpu" else numbers(loss)
        self._submit(partial(self._write, number, batches, own, num_ranks, fields))

    def call(self, work: Callable[[RunFiles], None]) -> None:
        """Has `work` done with the files, on rank 0 alone."""
        files = self._files
        if files is not None:
            self._submit(partial(work, files))

    def _submit(self, work: Callable[[], None]) -> None:
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        while len(self._pending) >= _MOST_PENDING:
            self._wait_for_one()
        self._pending.append(self._thread.submit(partial(self._do, work)))

    def _do(self, work: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        try:
            work()
        except BaseException as error:
            self._error = error  # the group is not to be used again
            raise

    def _write(
        self, number: int, batches: Sequence[SampleHashes], loss: Loss, num_ranks: int, fields: dict[str, Any]
    ) -> None:
        with self._group.guarded(f"recording step {number}"):
            plain = {name: numbers(value)[0] if _is_tensor(value) else value for name, value in fields.items()}
            share = share_of(batches, numbers(loss), num_ranks, plain)
            line = self._group.combine(share, partial(line_of, number))
            if self._files is not None:
                self._files.add_step(line)

    def flush(self) -> None:
        """Waits until all lines are written, and makes them durable.

        Raises:
            Exception: a line could not be written.
        """
        self.call(lambda files: files.steps.flush())
        while self._pending:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        # A signal that arrives just before a wait does not interrupt it, so every wait is short.
        while not wait([self._pending[0]], timeout=_POLL_SECONDS).done:
            pass
        self._pending.popleft().result()

    def close(self) -> None:
        """Ends the thread, without waiting for it, and closes the files behind what was submitted."""
        if self._files is not None:
            self._thread.submit(self._files.close)
        self._thread.end()


def numbers(values: Loss) -> list[float]:
    """Returns values as numbers of Python.

    >>> numbers(1), numbers(torch.tensor([1.5, 2.0])), numbers([0.5])
    ([1.0], [1.5, 2.0], [0.5])
    """
    if isinstance(values, torch.Tensor):
        return [float(value) for value in values.detach().flatten().tolist()]
    return [float(value) for value in values] if isinstance(values, Sequence) else [float(values)]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
