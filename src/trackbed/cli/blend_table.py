"""Tables of `trackbed blend`: datasets by split, and proportions by stage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from trackbed.builder import BlendPlan
    from trackbed.builder.blend_file import DatasetPlan, SplitPlan
from trackbed.plural import number_of

__all__ = ["compact", "largest_first", "show_plan"]

_MOST_ROWS: Final = 20
_STAGES_IN_A_TABLE: Final = 5
_UNITS: Final = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True, slots=True)
class DatasetSelection:
    """Numbers of the datasets that have a row of their own, and of those that share one."""

    shown: list[int]
    rest: list[int]


def compact(number: int) -> str:
    """Formats a number with three digits and a unit.

    >>> compact(1_234_567), compact(999), compact(999_999)
    ('1.23M', '999', '1M')
    """
    for unit, name in _UNITS:
        if number >= unit * 0.9995:
            return f"{number / unit:.3g}{name}"
    return str(number)


def largest_first(split: "SplitPlan", most: int) -> DatasetSelection:
    """Selects about `most` datasets to show, largest first; always includes those that fall short."""
    datasets = split.datasets
    by_samples = sorted(range(len(datasets)), key=lambda one: (-datasets[one].samples, -datasets[one].tokens))
    if len(by_samples) <= most + 1:  # a rest of one gets its own row
        return DatasetSelection(by_samples, [])
    short = [number for number in by_samples[most:] if datasets[number].shortfall is not None][:most]
    shown = by_samples[: most - len(short)] + short
    return DatasetSelection(shown, [number for number in by_samples if number not in set(shown)])


def show_plan(plan: "BlendPlan", *, show_all: bool) -> None:
    """Prints the tables of all splits."""
    console = Console(markup=False, highlight=False)
    click.echo(f'order "{plan.order}", samples of {number_of(plan.sequence_length, "token")}')
    for split in plan.splits:
        selection = largest_first(split, len(split.datasets) if show_all else _MOST_ROWS)
        click.echo(
            f"\n{split.split}: {number_of(len(split.datasets), 'dataset')}, {number_of(split.samples, 'sample')}, "
            f"{number_of(split.tokens, 'token')}"
        )
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


def _dataset_table(split: "SplitPlan", selection: DatasetSelection) -> Table:
    table = _table("dataset", ("documents", "tokens", "weight", "samples", "drawn", "epochs", "limit"))
    for number in selection.shown:
        one = split.datasets[number]
        limit = "" if one.max_epochs is None else f"{one.max_epochs:g}"
        style = "bold red" if one.shortfall is not None else ""
        mark = " short" if one.shortfall is not None else ""
        table.add_row(*_cells(one.name, [one], split), Text(limit + mark), style=style)
    if selection.rest:
        rest = [split.datasets[number] for number in selection.rest]
        table.add_row(*_cells(number_of(len(rest), "other"), rest, split), "", style="dim")
    table.add_section()
    table.add_row(*_cells("all", split.datasets, split), "")
    return table


def _cells(name: str, datasets: "Sequence[DatasetPlan]", split: "SplitPlan") -> list[str]:
    """Returns the row of one dataset, or of several combined."""
    tokens, drawn = sum(one.tokens for one in datasets), sum(one.tokens_drawn for one in datasets)
    epochs = datasets[0].epochs if len(datasets) == 1 else drawn / max(tokens, 1)
    return [
        name,
        compact(sum(one.documents for one in datasets)),
        compact(tokens),
        f"{sum(one.weight for one in datasets):.2%}",
        compact(sum(one.samples for one in datasets)),
        compact(drawn),
        f"{epochs:.2f}" if epochs < 100 or not split.samples else f"{epochs:,.0f}",
    ]


def _stage_table(split: "SplitPlan", selection: DatasetSelection, stages: Sequence[int]) -> Table:
    """Returns the table of the share of each dataset in each stage."""
    found = [split.stages[stage] for stage in stages]
    tokens_a_sample = split.tokens // max(split.samples, 1)
    heads = [f"from {compact(stage.first_sample * tokens_a_sample)}" for stage in found]
    table = _table("share by stage, from token", heads)
    groups = [[number] for number in selection.shown] + ([selection.rest] if selection.rest else [])
    for group in groups:
        name = split.datasets[group[0]].name if len(group) == 1 else number_of(len(group), "other")
        shares = []
        for stage in found:
            drawn, total = sum(stage.samples[number] for number in group), sum(stage.samples)
            ended = " ended" if name in stage.ended else ""
            shares.append((f"{drawn / total:.2%}" if total else "-") + ended)
        table.add_row(name, *shares)
    return table
