"""Progress of long commands: a bar on a terminal, else a line every ten seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import click

__all__ = ["cumulative", "show_progress", "size_of"]

_SECONDS_BETWEEN_LINES: Final = 10.0

ByteProgress = Callable[[int, int], None]
"""Callback that receives the bytes done so far and the bytes in all."""


@contextlib.contextmanager
def show_progress(what: str) -> Iterator[ByteProgress]:
    """Shows the progress of the block on stderr; the block reports it by calling the yielded function."""
    if sys.stderr.isatty():
        with _bar(what) as progress:
            yield progress
    else:
        yield _PeriodicLine(what, time.monotonic())


@contextlib.contextmanager
def _bar(what: str) -> Iterator[ByteProgress]:
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
    # The speed is averaged over the last minute, so that the remaining time follows the load of the machine.
    with Bars(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=60) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


class _PeriodicLine:
    """Prints a line every ten seconds.

    Args:
        what: name of the work.
        start: start of the work on the monotonic clock, in seconds.
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


def cumulative(progress: ByteProgress, total_bytes: int) -> Callable[[int], None]:
    """Returns a function that receives the bytes of each step, and calls `progress` with their sum."""
    done = 0

    def step(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total_bytes)

    return step


def size_of(paths: Iterable[str]) -> int:
    """Returns the total size of the files and objects that exist, in bytes."""
    from trackbed.files.stores import ObjectStamp, is_address, parse_address, stamps_of_objects

    wanted = list(paths)
    stamps = stamps_of_objects([parse_address(path) for path in wanted if is_address(path)])
    stored = sum(stamp.size_bytes for stamp in stamps if isinstance(stamp, ObjectStamp))
    files = (Path(path) for path in wanted if not is_address(path))
    return stored + sum(path.stat().st_size for path in files if path.is_file())
