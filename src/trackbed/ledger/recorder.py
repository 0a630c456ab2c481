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
from trackbed.errors import ArgumentError
from trackbed.ledger.lines import LineFile, check_lines
from trackbed.ledger.record import BEGIN, EVENTS, STEPS
from trackbed.ledger.share import line_of, share_of
from trackbed.ledger.steering import LAG, Steering, combined
from trackbed.loading.sample_hashes import SampleHashes

logger = logging.getLogger(__name__)

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
        check_lines(folder / EVENTS, "event")
        check_lines(folder / STEPS, "step")
        self.events = LineFile(folder / EVENTS)
        try:
            self.steps = LineFile(folder / STEPS)
        except BaseException:
            self.events.close()
            raise
        self._observers = list(observers)
        self._teller = DaemonThreads("trackbed-observers")
        """Thread of the observers: one that takes long holds neither the record nor training."""

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
        """Closes the files, and waits until the observers are told of everything."""
        self._tell(lambda one: one.close()).result()
        self._teller.end()
        self.steps.close()
        self.events.close()

    def _tell(self, call: Callable[[Observer], None]) -> Future[None]:
        """Has all observers called, in order."""
        return self._teller.submit(partial(self._call, call))

    def _call(self, call: Callable[[Observer], None]) -> None:
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
        steering: changes of the blend, which the ranks tell each other with the steps; None for a blend that stays.
    """

    def __init__(self, group: Group, files: RunFiles | None, steering: Steering | None = None) -> None:
        self._group = group
        self._files = files
        self._steering = steering
        self._thread = DaemonThreads("trackbed-ledger")
        self._pending: deque[Future[None]] = deque()
        self._error: BaseException | None = None
        """Error with which the ranks have failed together."""
        self._call_error: Exception | None = None
        """Error of rank 0 that the others do not know yet."""

    def step(
        self,
        number: int,
        batches: Sequence[SampleHashes],
        loss: Loss,
        num_ranks: int,
        fields: dict[str, Any],
        stages: str = "",
    ) -> None:
        """Has the line of a step written, of the shares of all ranks.

        Returns once the line `LAG` steps before is written.

        Raises:
            Exception: a line before could not be written.
        """
        own = loss.detach().clone() if isinstance(loss, torch.Tensor) and loss.device.type != "cpu" else numbers(loss)
        self._submit(partial(self._write, number, batches, own, num_ranks, fields, stages))

    def call(self, work: Callable[[RunFiles], None]) -> None:
        """Has `work` done with the files, on rank 0 alone. If it fails, the next step or `flush` fails on all ranks."""
        files = self._files
        if files is not None:
            self._thread.submit(partial(self._do_call, work, files))

    def _do_call(self, work: Callable[[RunFiles], None], files: RunFiles) -> None:
        try:
            work(files)
        except Exception as error:  # noqa: BLE001  it is raised with the next step
            self._call_error = error

    def _submit(self, work: Callable[[], None]) -> None:
        """Has `work` done, which meets the other ranks, and waits until at most `LAG` such works are left.

        A work fails on all ranks or on none, and its error is raised `LAG` works later, so on all ranks in one call.
        """
        self._pending.append(self._thread.submit(partial(self._do, work)))
        while len(self._pending) > LAG:
            self._wait_for_one()

    def _do(self, work: Callable[[], None]) -> None:
        if self._error is not None:
            raise self._error
        try:
            work()
        except BaseException as error:
            self._error = error  # the group is not to be used again
            raise

    def _check_calls(self) -> None:
        if self._call_error is not None:
            raise self._call_error

    def _write(
        self,
        number: int,
        batches: Sequence[SampleHashes],
        loss: Loss,
        num_ranks: int,
        fields: dict[str, Any],
        stages: str,
    ) -> None:
        with self._group.guarded(f"recording step {number}"):
            self._check_calls()
            plain = {name: numbers(value)[0] if _is_tensor(value) else value for name, value in fields.items()}
            share = share_of(batches, numbers(loss), num_ranks, plain)
            if self._steering is not None:
                share["blend"] = self._steering.share(stages)
            found = self._group.combine(share, partial(_joined, number))
            if "error" in found["blend"]:
                raise ArgumentError(found["blend"]["error"])
            if self._files is not None:
                self._files.add_step(found["line"])
            if self._steering is not None:
                self._steering.take(number, found["blend"])

    def flush(self) -> None:
        """Waits until all lines are written, and makes them durable. Collective.

        Raises:
            Exception: a line could not be written.
        """
        self._submit(self._sync)
        while self._pending:
            self._wait_for_one()

    def _sync(self) -> None:
        with self._group.guarded("making the record durable"):
            self._check_calls()
            if self._files is not None:
                self._files.steps.flush()

    def _wait_for_one(self) -> None:
        # A signal that arrives just before a wait does not interrupt it, so every wait is short.
        while not wait([self._pending[0]], timeout=_POLL_SECONDS).done:
            pass
        self._pending.popleft().result()

    def close(self, *, waits: bool) -> None:
        """Ends the thread, and closes the files behind what was submitted. With `waits`, returns once they are."""
        if self._files is not None:
            closed = self._thread.submit(self._files.close)
            while waits and not wait([closed], timeout=_POLL_SECONDS).done:
                pass
        self._thread.end()


def _joined(number: int, shares: list[dict[str, Any]]) -> dict[str, Any]:
    return {"line": line_of(number, shares), "blend": combined([share.get("blend") for share in shares])}


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
