"""Output of `trackbed build --plan`: indices per process, and predicted time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click
from rich import box
from rich.console import Console
from rich.table import Table

from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.builder.schedule import Plan, Task


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
