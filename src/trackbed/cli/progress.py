"""How far a long command is: a bar where somebody looks, else a line now and then."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import click

__all__ = ["counted", "show_progress", "size_of"]

_SECONDS_BETWEEN_LINES: Final = 10.0

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and the bytes of all the work."""


@contextlib.contextmanager
def show_progress(what: str) -> Iterator[Progress]:
    """Show on stderr how far the work in the block is, which tells the function that comes back."""
    if sys.stderr.isatty():
        with _bar(what) as progress:
            yield progress
    else:
        yield _Lines(what, time.monotonic())


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    # The speed is that of the last minute, so that the remaining time follows the machine's load.
    with Bars(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=60) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


class _Lines:
    """A line every ten seconds.

    Args:
        what: what is being done.
        start: the time on the monotonic clock, in seconds.
    """

    def __init__(self, what: str, start: float) -> None:
        self._what = what
        self._start = self._last = start

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LINES or not done:
            return
        self._last = now
        rate = done / (now - self._start)
        click.echo(
            f"{self._what}: {done / total:.0%} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, "
            f"{(total - done) / rate:.0f} s left",
            err=True,
        )


def counted(progress: Progress, total_bytes: int) -> Callable[[int], None]:
    """The function to call with the bytes of each step, where the work calls with steps and not with sums."""
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total_bytes)

    return step


def size_of(paths: Iterable[str]) -> int:
    """Bytes of those files that there are."""
    return sum(Path(path).stat().st_size for path in paths if Path(path).is_file())
