"""Progress of long commands, a bar on a terminal or lines now and then, and the work that a resumed run keeps."""

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import click

_SECONDS_BETWEEN_LINES: Final = 10.0

ByteProgress = Callable[[int, int], None]
"""Callback that receives the bytes done so far and the bytes in all."""


class Progress(Protocol):
    """Display of the progress of a command."""

    def __call__(self, done: int, total: int) -> None:
        """Shows the bytes done so far, of the bytes in all."""

    def count(self, what: str) -> None:
        """Adds 1 to a number that is shown beside the progress, such as the number of failed attempts."""


@contextlib.contextmanager
def show_progress(what: str) -> Iterator[Progress]:
    """Shows the progress of the block on stderr; the block reports it by calling the yielded function."""
    if sys.stderr.isatty():
        with _bar(what) as progress:
            yield progress
    else:
        yield _PeriodicLine(what, time.monotonic())


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
    # The speed is averaged over the last minute, so that the remaining time follows the load of the machine.
    with Bars(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=60) as bars:
        yield _Bar(what, bars)


class _Bar:
    """Moves a bar.

    Args:
        what: name of the work.
        bars: the display.
    """

    def __init__(self, what: str, bars: Any) -> None:
        self._what = what
        self._bars = bars
        self._task = bars.add_task(what, total=None)
        self._counts: Counter[str] = Counter()
        self._has_begun = False

    def __call__(self, done: int, total: int) -> None:
        if not self._has_begun:
            # Bytes that were done when the work began do not count for the speed.
            self._bars.reset(self._task, completed=done, total=total)
            self._has_begun = True
        self._bars.update(self._task, completed=done, total=total)

    def count(self, what: str) -> None:
        """Adds 1 to a number in the description of the bar."""
        self._counts[what] += 1
        self._bars.update(self._task, description=f"{self._what}{_listed(self._counts)}")


class _PeriodicLine:
    """Prints a line every ten seconds.

    Args:
        what: name of the work.
        start: start of the work on the monotonic clock, in seconds.
    """

    def __init__(self, what: str, start: float) -> None:
        self._what = what
        self._start = self._last = start
        self._first: int | None = None
        """Bytes that were done when the work began, which do not count for the rate."""
        self._counts: Counter[str] = Counter()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._start = done, now
        if now - self._last < _SECONDS_BETWEEN_LINES or done <= self._first:
            return
        self._last = now
        rate = (done - self._first) / (now - self._start)
        click.echo(
            f"{self._what}: {done / total:.0%} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, "
            f"{(total - done) / rate:.0f} s left{_listed(self._counts)}",
            err=True,
        )

    def count(self, what: str) -> None:
        """Adds 1 to a number at the end of the line."""
        self._counts[what] += 1


def _listed(counts: "Counter[str]") -> str:
    return "".join(f", {what} {number:,}" for what, number in counts.items())


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


class KeptWork:
    """Callback that receives the bytes whose work is kept, at the start of a run and after each save."""

    def __init__(self) -> None:
        self._bytes: tuple[int, int] | None = None
        """Bytes whose work is kept, and bytes in all; None before the start."""

    def __call__(self, kept: int, total: int) -> None:
        """Keeps the numbers; says at the start of a resumed run how far the earlier one was."""
        if self._bytes is None and 0 < kept < total:
            click.echo(f"trackbed: going on at {_part(kept, total)}", err=True)
        self._bytes = kept, total

    @contextlib.contextmanager
    def told_at_an_interrupt(self) -> Iterator[None]:
        """Adds to an interrupt of the block what is kept."""
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._text()) from None

    def _text(self) -> str:
        if self._bytes is None:
            return ""
        if not self._bytes[0]:
            return "nothing is kept yet"
        return f"{_part(*self._bytes)} are kept; run the same command again to go on"


def _part(done: int, total: int) -> str:
    """Formats a part of some bytes.

    >>> _part(134_200_000, 380_000_000)
    '134.2 of 380.0 MB'
    """
    return f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
