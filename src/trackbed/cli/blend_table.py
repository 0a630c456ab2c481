"""Tables of `trackbed blend`: datasets by split, and proportions by stage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click
from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from trackbed.blends import BlendPlan, DatasetPlan, SplitPlan
from trackbed.cli.console import table_console
from trackbed.plural import number_of

_MOST_ROWS: Final = 20
_STAGES_IN_A_TABLE: Final = 5
_UNITS: Final = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: a dataset, or all datasets of one `[[dataset]]`."""

    name: str
    numbers: tuple[int, ...]
    """Numbers of its datasets in the split."""


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Rows that are shown, and those that share one."""

    shown: list[Row]
    rest: list[Row]

    @property
    def rest_numbers(self) -> tuple[int, ...]:
        """Numbers of the datasets of the rest."""
        return tuple(number for row in self.rest for number in row.numbers)


def compact(number: int) -> str:
    """Formats a number with three digits and a unit.

    >>> compact(1_234_567), compact(999), compact(999_999)
    ('1.23M', '999', '1M')
    """
    for unit, name in _UNITS:
        if number >= unit * 0.9995:
            return f"{number / unit:.3g}{name}"
    return str(number)


def rows_of(split: "SplitPlan", *, members: bool) -> list[Row]:
    """Returns a row for each `[[dataset]]` of the file, or with `members` for each dataset of its globs."""
    if members:
        return [Row(one.name, (number,)) for number, one in enumerate(split.datasets)]
    numbers: dict[str, list[int]] = {}
    for number, one in enumerate(split.datasets):
        numbers.setdefault(one.entry, []).append(number)
    return [Row(name, tuple(found)) for name, found in numbers.items()]


def largest_first(split: "SplitPlan", rows: Sequence[Row], most: int) -> RowSelection:
    """Selects about `most` rows to show, largest first; always includes those that fall short."""

    def size(row: Row) -> tuple[int, int]:
        found = [split.datasets[number] for number in row.numbers]
        return -sum(one.samples for one in found), -sum(one.tokens for one in found)

    by_samples = sorted(rows, key=size)
    if len(by_samples) <= most + 1:  # a rest of one gets its own row
        return RowSelection(by_samples, [])
    short = [row for row in by_samples[most:] if _is_short(split, row)][:most]
    shown = by_samples[: most - len(short)] + short
    numbers = {row.numbers for row in shown}
    return RowSelection(shown, [row for row in by_samples if row.numbers not in numbers])


def _is_short(split: "SplitPlan", row: Row) -> bool:
    return any(split.datasets[number].shortfall is not None for number in row.numbers)


def show_plan(plan: "BlendPlan", *, show_all: bool, members: bool) -> None:
    """Prints the tables of all splits.

    Args:
        plan: the plan.
        show_all: True to show every row, however small.
        members: True for a row for each dataset of a glob, instead of one for the glob.
    """
    console = table_console()
    click.echo(f'order "{plan.order}", samples of ' + number_of(plan.sequence_length, "token"))
    for split in plan.splits:
        rows = rows_of(split, members=members)
        selection = largest_first(split, rows, len(rows) if show_all else _MOST_ROWS)
        click.echo(
            f"\n{split.split}: {number_of(len(rows), 'dataset')}, {number_of(split.samples, 'sample')}, "
            f"{number_of(split.tokens, 'token')}"
        )
        for note in split.notes:
            click.echo(f"{split.split}: {note}")
        console.print(_dataset_table(split, selection))
        if len(split.stages) > 1:
            for first in range(0, len(split.stages), _STAGES_IN_A_TABLE):
                console.print(_stage_table(split, selection, range(first, len(split.stages))[:_STAGES_IN_A_TABLE]))


def _table(first: str, columns: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", min_width=12)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _dataset_table(split: "SplitPlan", selection: RowSelection) -> Table:
    table = _table("dataset", ("pairs", "documents", "tokens", "weight", "samples", "drawn", "epochs", "limit"))
    for row in selection.shown:
        datasets = [split.datasets[number] for number in row.numbers]
        limit = "" if datasets[0].max_epochs is None else f"{datasets[0].max_epochs:g}"
        mark, style = (" short", "bold red") if _is_short(split, row) else ("", "")
        table.add_row(*_cells(row.name, datasets, split), Text(limit + mark), style=style)
    if selection.rest:
        rest = [split.datasets[number] for number in selection.rest_numbers]
        table.add_row(*_cells(number_of(len(selection.rest), "other"), rest, split), "", style="dim")
    table.add_section()
    table.add_row(*_cells("all", split.datasets, split), "")
    return table


def _cells(name: str, datasets: "Sequence[DatasetPlan]", split: "SplitPlan") -> list[str]:
    """Returns the row of one dataset, or of several combined."""
    tokens, drawn = sum(one.tokens for one in datasets), sum(one.tokens_drawn for one in datasets)
    epochs = datasets[0].epochs if len(datasets) == 1 else drawn / max(tokens, 1)
    return [
        name,
        f"{sum(one.pairs for one in datasets):,}",
        compact(sum(one.documents for one in datasets)),
        compact(tokens),
        f"{sum(one.weight for one in datasets):.2%}",
        compact(sum(one.samples for one in datasets)),
        compact(drawn),
        f"{epochs:.2f}" if epochs < 100 or not split.samples else f"{epochs:,.0f}",
    ]


def _stage_table(split: "SplitPlan", selection: RowSelection, stages: Sequence[int]) -> Table:
    """Returns the table of the share of each row in each stage."""
    found = [split.stages[stage] for stage in stages]
    tokens_a_sample = split.tokens // max(split.samples, 1)
    heads = [f"from {compact(stage.first_sample * tokens_a_sample)}" for stage in found]
    table = _table("share by stage, from token", heads)
    rest = [Row(number_of(len(selection.rest), "other"), selection.rest_numbers)] if selection.rest else []
    for row in (*selection.shown, *rest):
        names = {split.datasets[number].name for number in row.numbers}
        shares = []
        for stage in found:
            drawn, total = sum(stage.samples[number] for number in row.numbers), sum(stage.samples)
            ended = " ended" if names <= set(stage.ended) else ""
            shares.append((f"{drawn / total:.2%}" if total else "-") + ended)
        table.add_row(row.name, *shares)
    return table
