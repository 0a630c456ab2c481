"""The tables of `trackbed blend`: datasets by split, and proportions by stage."""

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

__all__ = ["compact", "largest_first", "show_plan"]

_MOST_ROWS: Final = 20
_STAGES_IN_A_TABLE: Final = 5
_UNITS: Final = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


@dataclass(frozen=True, slots=True)
class Chosen:
    """The datasets that are shown, and those that are summed up."""

    shown: list[int]
    rest: list[int]


def compact(number: int) -> str:
    """A number in three digits, as people say it.

    >>> compact(1_234_567), compact(999), compact(999_999)
    ('1.23M', '999', '1M')
    """
    for unit, name in _UNITS:
        if number >= unit * 0.9995:
            return f"{number / unit:.3g}{name}"
    return str(number)


def largest_first(split: "SplitPlan", most: int) -> Chosen:
    """Numbers of the datasets, those that give most first; those that fall short are always among the shown ones."""
    datasets = split.datasets
    by_samples = sorted(range(len(datasets)), key=lambda one: (-datasets[one].samples, -datasets[one].tokens))
    if len(by_samples) <= most + 1:  # a rest of one is shown itself
        return Chosen(by_samples, [])
    short = [number for number in by_samples[most:] if datasets[number].shortfall is not None][:most]
    shown = by_samples[: most - len(short)] + short
    return Chosen(shown, [number for number in by_samples if number not in set(shown)])


def show_plan(plan: "BlendPlan", *, show_all: bool) -> None:
    """Print the tables of all splits."""
    console = Console(markup=False, highlight=False)
    click.echo(f'order "{plan.order}", samples of {plan.sequence_length:,} tokens')
    for split in plan.splits:
        chosen = largest_first(split, len(split.datasets) if show_all else _MOST_ROWS)
        click.echo(
            f"\n{split.split}: {_counted(len(split.datasets), 'dataset')}, {split.samples:,} samples, "
            f"{split.tokens:,} tokens"
        )
        console.print(_dataset_table(split, chosen))
        if len(split.stages) > 1:
            for first in range(0, len(split.stages), _STAGES_IN_A_TABLE):
                console.print(_stage_table(split, chosen, range(first, len(split.stages))[:_STAGES_IN_A_TABLE]))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _table(first: str, columns: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold", min_width=12)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _dataset_table(split: "SplitPlan", chosen: Chosen) -> Table:
    table = _table("dataset", ("documents", "tokens", "weight", "samples", "drawn", "epochs", "limit"))
    for number in chosen.shown:
        one = split.datasets[number]
        limit = "" if one.max_epochs is None else f"{one.max_epochs:g}"
        style = "bold red" if one.shortfall is not None else ""
        mark = " short" if one.shortfall is not None else ""
        table.add_row(*_cells(one.name, [one], split), Text(limit + mark), style=style)
    if chosen.rest:
        rest = [split.datasets[number] for number in chosen.rest]
        table.add_row(*_cells(f"{_counted(len(rest), 'other')}", rest, split), "", style="dim")
    table.add_section()
    table.add_row(*_cells("all", split.datasets, split), "")
    return table


def _cells(name: str, datasets: "Sequence[DatasetPlan]", split: "SplitPlan") -> list[str]:
    """The row of one dataset, or of several together."""
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


def _stage_table(split: "SplitPlan", chosen: Chosen, stages: Sequence[int]) -> Table:
    """The share of each dataset in each stage."""
    found = [split.stages[stage] for stage in stages]
    tokens_a_sample = split.tokens // max(split.samples, 1)
    heads = [f"from {compact(stage.first_sample * tokens_a_sample)}" for stage in found]
    table = _table("share by stage, from token", heads)
    groups = [[number] for number in chosen.shown] + ([chosen.rest] if chosen.rest else [])
    for group in groups:
        name = split.datasets[group[0]].name if len(group) == 1 else f"{len(group):,} others"
        shares = []
        for stage in found:
            drawn, total = sum(stage.samples[number] for number in group), sum(stage.samples)
            ended = " ended" if name in stage.ended else ""
            shares.append((f"{drawn / total:.2%}" if total else "-") + ended)
        table.add_row(name, *shares)
    return table
