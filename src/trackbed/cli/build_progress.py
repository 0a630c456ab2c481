"""Output of `trackbed build`: the plan with `--plan`, else a bar on a terminal or a line now and then."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click
from rich import box
from rich.console import Console
from rich.table import Table

from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.builder.executor import Progress
    from trackbed.builder.schedule import Plan, Task
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


_MOST_ROWS: Final = 20


def show_plan(tasks: "Sequence[Task]", plan: "Plan", *, num_threads: int) -> None:
    """Prints the number of indices per process, and the predicted time."""
    if not tasks:
        click.echo("all indices exist: nothing to build")
        return
    ranks = len(plan.by_rank)
    click.echo(
        f"{number_of(len(tasks), 'index', 'indices')} to build, "
        f"{sum(task.is_blend for task in tasks):,} of them of blends, "
        f"by {number_of(ranks, 'process', 'processes')} of {number_of(num_threads, 'thread')}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("process", "indices", "of blends", "predicted"):
        table.add_column(column, justify="right")
    for rank, mine in list(enumerate(plan.by_rank))[:_MOST_ROWS]:
        blends = sum(tasks[number].is_blend for number in mine)
        seconds = _seconds([tasks[number] for number in mine], num_threads)
        table.add_row(f"{rank:,}", f"{len(mine):,}", f"{blends:,}", f"{seconds:,.1f} s")
    Console(markup=False, highlight=False).print(table)
    if ranks > _MOST_ROWS:
        click.echo(f"and {number_of(ranks - _MOST_ROWS, 'more process', 'more processes')}")
    longest = max(_seconds([tasks[number] for number in mine], num_threads) for mine in plan.by_rank)
    click.echo(
        f"predicted: {longest:,.1f} s; the process with the most work has {plan.makespan / plan.lower_bound:.2f} times "
        "the lower bound of any plan"
    )


def _seconds(tasks: "Sequence[Task]", num_threads: int) -> float:
    """Predicts the time in seconds: blends run one at a time, and all tasks together use all threads."""
    blends = sum(task.cost for task in tasks if task.is_blend)
    return max(blends, sum(task.cost for task in tasks) / num_threads) / 1e9
