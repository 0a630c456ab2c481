"""Progress of `trackbed build`: a bar on a terminal, else a line now and then."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from trackbed.builder.executor import Progress
    from trackbed.comm import Group


_SECONDS_BETWEEN_LINES: Final = 10.0
_SECONDS_BETWEEN_LOOKS: Final = 0.5


@contextlib.contextmanager
def show_building(group: "Group") -> Iterator["Progress"]:
    """Shows on stderr of the first process how far all of them are; the others tell it."""
    if group.rank > 0:
        yield lambda *part: group.publish_status(part)
    elif sys.stderr.isatty():
        with _bar() as show:
            yield _Sum(group, show)
    else:
        yield _Sum(group, _Lines(time.monotonic()))


class _Sum:
    """Shows how far all processes are, as far as they have told.

    Args:
        group: all of them; this is the first.
        show: given entries that are built, entries in all, and the share that is done.
    """

    def __init__(self, group: "Group", show: "Progress") -> None:
        self._group = group
        self._show = show
        self._next = 0.0
        self._others: list[list[float]] = []

    def __call__(self, *part: float) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_LOOKS
            self._others = [status for status in self._group.statuses()[1:] if status]
        parts = [part, *self._others]
        share = min(1.0, sum(part[2] for part in parts))
        self._show(int(sum(part[0] for part in parts)), int(part[1]), share)


@contextlib.contextmanager
def _bar() -> Iterator["Progress"]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("looking for indices", total=None)
        started = time.monotonic()

        def show(done: int, total: int, share: float) -> None:
            rate = done / max(time.monotonic() - started, 1e-9)
            text = f"{done:,} of {total:,} indices, {rate:,.1f}/s"
            bars.update(task, description=text, completed=share, total=1.0)

        yield show


class _Lines:
    """A line every ten seconds.

    Args:
        start: the time on the monotonic clock, in seconds.
    """

    def __init__(self, start: float) -> None:
        self._start = self._last = start

    def __call__(self, done: int, total: int, share: float) -> None:
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES or not share:
            return
        self._last = now
        seconds = now - self._start
        click.echo(
            f"built {done:,} of {total:,} indices, {done / seconds:,.1f}/s, {seconds / share - seconds:.0f} s left",
            err=True,
        )
