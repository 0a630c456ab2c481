"""Signals to some ranks, at which all ranks are to do something at the same step.

A thread of each rank is in one long step of a group. A rank that gets a signal ends it for all; the threads then tell
each other the last step that their rank has polled, and the highest of these plus one is the step.
"""

import contextlib
import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, Final

from trackbed.comm import Group
from trackbed.daemon_threads import call_on_thread
from trackbed.errors import ArgumentError, CollectiveError

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.05
_HEARTBEAT_SECONDS: Final = 30.0
_NONE: Final = -1


class _ReceivedSignalError(Exception):
    pass


def check_signals(signals: Sequence[Any]) -> None:
    """Checks that signals can be handled.

    Raises:
        ArgumentError: one cannot, or this is not the main thread.
    """
    for number in signals:
        try:
            found = signal.Signals(number)
        except ValueError:
            raise ArgumentError(f"signals: must be signals such as SIGTERM, found {number!r}") from None
        if found in (signal.SIGKILL, signal.SIGSTOP):
            raise ArgumentError(f"signals: must be such that a program can handle them, found {found.name}")
    if signals and threading.current_thread() is not threading.main_thread():
        raise ArgumentError("signals: must be handled by the main thread of the process, but this is another one")


class SignalAgreement:
    """Agreement of the ranks on the step at which they act on a signal.

    Args:
        group: the ranks; this object alone uses it.
        signals: signals that are handled; none where others call `ask`.

    Raises:
        ArgumentError: see `check_signals`.
    """

    def __init__(self, group: Group, signals: Sequence[int] = ()) -> None:
        self._group = group
        self._changed = threading.Condition()
        self._asked = threading.Event()
        self._received: deque[int] = deque()
        """Signals to this rank on which the ranks have not agreed."""
        self._is_agreeing = False
        self._is_closing = False
        self._has_failed = False
        """True once the ranks cannot agree any more."""
        self._last_polled = _NONE
        self._targets: deque[tuple[int, signal.Signals]] = deque()
        """Steps on which the ranks have agreed, and that this rank has not reached, with the signals."""
        self.received: signal.Signals | None = None
        """Signal of the step at which this rank was last told to act."""
        self._handlers: dict[int, Any] = {}
        check_signals(signals)
        for number in signals:
            self._handlers[number] = signal.signal(number, self._handle)
        self._thread = call_on_thread(self._run, "trackbed signals") if group.size > 1 else None

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Does what a signal to this rank does. Any thread may call it."""
        self._received.append(number)
        self._asked.set()

    def is_due(self, step: int) -> bool:
        """True at one step after a signal to any rank, on all ranks the same. Waits only while the ranks agree on it.

        Args:
            step: step that this rank has made, higher than those before.
        """
        if self._group.size == 1:
            self._add_targets(step, self._take_received())
        with self._changed:
            while self._is_agreeing:
                self._changed.wait()
            self._last_polled = step
            is_due = bool(self._targets) and step >= self._targets[0][0]
            if is_due:
                _, self.received = self._targets.popleft()
            return is_due

    def _take_received(self) -> list[int]:
        """Signals to this rank since the last call."""
        # A signal may come at any moment: the event is cleared first, so that none is forgotten.
        self._asked.clear()
        return [self._received.popleft() for _ in range(len(self._received))]

    def _add_targets(self, first: int, numbers: Iterable[int]) -> None:
        """Adds a step for each signal."""
        self._targets += [(first + place, signal.Signals(one)) for place, one in enumerate(sorted(set(numbers)))]

    def close(self) -> None:
        """Restores the handlers. Other ranks may still agree on a step, without this one."""
        self._is_closing = True
        self._restore()

    def wait_for_end(self, seconds: float) -> None:
        """Waits, after `close`, until all ranks have closed theirs or have ended, at most for some seconds.

        A program that ends in the middle of a request of the thread would end with an error of torch.
        """
        if self._thread is not None:
            with contextlib.suppress(TimeoutError):
                self._thread.exception(seconds)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._has_failed:
            self.ask(number)
            return
        self._restore()  # the ranks cannot agree any more: the signal does what it does without this object
        os.kill(os.getpid(), number)

    def _restore(self) -> None:
        if self._handlers and threading.current_thread() is not threading.main_thread():
            logger.warning("handlers of signals stay as they are, since only the main thread can restore them")
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _run(self) -> None:
        """Agrees again and again, on a thread, until all ranks close."""
        try:
            while self._is_signal_received():
                self._agree()
        except CollectiveError as error:
            self._has_failed = True
            if not self._is_closing:
                logger.warning("signals are not handled any more: %s", error)
        finally:
            with self._changed:
                self._is_agreeing = False
                self._changed.notify_all()

    def _is_signal_received(self) -> bool:
        """Collective over the ranks: waits for a signal to one of them. Returns False once all are closing."""
        try:
            with self._group.guarded("signals", max_heartbeat_gap_seconds=_HEARTBEAT_SECONDS) as step:
                while not self._is_closing:
                    if self._asked.wait(_LOOK_SECONDS):
                        raise _ReceivedSignalError
                    step.poll(0)
        except CollectiveError as error:
            if _ReceivedSignalError.__name__ not in str(error):
                raise
            return True
        return False

    def _agree(self) -> None:
        """Collective over the ranks: agrees on a step, which no rank passes meanwhile."""
        with self._changed:
            self._is_agreeing = True
            last = self._last_polled
        of_ranks = self._group.all_gather([last, self._take_received()])
        with self._changed:
            first = max(last for last, _ in of_ranks) + 1
            self._add_targets(first, (number for _, numbers in of_ranks for number in numbers))
            self._is_agreeing = False
            self._changed.notify_all()
