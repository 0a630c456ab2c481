"""How far `trackbed build` is: a bar where somebody looks, else a line now and then."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from trackbed.build.ranks import Progress
    from trackbed.comm import Group

__all__ = ["show_building"]

_SECONDS_BETWEEN_LINES: Final = 10.0


@contextlib.contextmanager
def show_building(group: "Group") -> Iterator["Progress | None"]:
    """Show on stderr of the first process how far its part is: the plan gives all of them as much to do."""
    if group.rank > 0:
        yield None
    elif sys.stderr.isatty():
        with _bar(group.size) as progress:
            yield progress
    else:
        yield _Lines(time.monotonic(), group.size)


@contextlib.contextmanager
def _bar(size: int) -> Iterator["Progress"]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("looking for indices", total=None)
        started = time.monotonic()

        def show(done: int, total: int, share: float) -> None:
            rate = done / max(time.monotonic() - started, 1e-9)
            text = f"{done:,} of {total:,} indices{_part(size)}, {rate:,.1f}/s"
            bars.update(task, description=text, completed=share, total=1.0)

        yield show


class _Lines:
    """A line every ten seconds.

    Args:
        start: the time on the monotonic clock, in seconds.
        size: how many processes build.
    """

    def __init__(self, start: float, size: int) -> None:
        self._start = self._last = start
        self._size = size

    def __call__(self, done: int, total: int, share: float) -> None:
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES or not share:
            return
        self._last = now
        seconds = now - self._start
        click.echo(
            f"built {done:,} of {total:,} indices{_part(self._size)}, {done / seconds:,.1f}/s, "
            f"{seconds / share - seconds:.0f} s left",
            err=True,
        )


def _part(size: int) -> str:
    return f" of process 0 of {size}" if size > 1 else ""
