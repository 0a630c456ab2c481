"""Tables and plots of `trackbed blend`: datasets by split, and proportions by stage."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich import box
from rich.table import Table
from rich.text import Text

from trackbed.cli.output import table_console
from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.blends import BlendPlan, DatasetPlan, SplitPlan


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
        for line in _packing_lines(split, selection, plan):
            click.echo(line)
        if len(split.stages) > 1:
            for first in range(0, len(split.stages), _STAGES_IN_A_TABLE):
                console.print(_stage_table(split, selection, range(first, len(split.stages))[:_STAGES_IN_A_TABLE]))


def _packing_lines(split: "SplitPlan", selection: RowSelection, plan: "BlendPlan") -> Iterator[str]:
    """Says how full the packs of each shown row are, and what becomes of documents that are longer than a sample."""
    for row in selection.shown:
        found = [one for number in row.numbers if (one := split.datasets[number].packing) is not None]
        packs = sum(one.packs for one in found)
        if not packs:
            continue
        fill = sum(one.places for one in found) / (packs * plan.sequence_length)
        longer, lost = sum(one.longer for one in found), sum(one.lost_tokens for one in found)
        words = f"{row.name}: {number_of(packs, 'pack')} an epoch, {fill:.2%} full"
        if longer:
            share = longer / max(1, sum(split.datasets[number].documents for number in row.numbers))
            fate = f"lose {number_of(lost, 'token')}" if lost else "are split (pack_long)"
            words += f"; {number_of(longer, 'document')} ({share:.2%}) of more than {plan.sequence_length + 1:,} {fate}"
        yield words


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
    tokens, drawn = sum(dataset.tokens for dataset in datasets), sum(dataset.tokens_drawn for dataset in datasets)
    epochs = datasets[0].epochs if len(datasets) == 1 else drawn / max(tokens, 1)
    return [
        name,
        f"{sum(dataset.pairs for dataset in datasets):,}",
        compact(sum(dataset.documents for dataset in datasets)),
        compact(tokens),
        f"{sum(dataset.weight for dataset in datasets):.2%}",
        compact(sum(dataset.samples for dataset in datasets)),
        compact(drawn),
        f"{epochs:.2f}" if epochs < 100 or not split.samples else f"{epochs:,.0f}",
    ]


def _stage_table(split: "SplitPlan", selection: RowSelection, stages: Sequence[int]) -> Table:
    """Returns the table of the share of each row in each stage."""
    shown = [split.stages[stage] for stage in stages]
    tokens_a_sample = split.tokens // max(split.samples, 1)
    heads = [f"from {compact(stage.first_sample * tokens_a_sample)}" for stage in shown]
    table = _table("share by stage, from token", heads)
    rest = [Row(number_of(len(selection.rest), "other"), selection.rest_numbers)] if selection.rest else []
    for row in (*selection.shown, *rest):
        names = {split.datasets[number].name for number in row.numbers}
        shares = []
        for stage in shown:
            drawn, total = sum(stage.samples[number] for number in row.numbers), sum(stage.samples)
            ended = " ended" if names <= set(stage.ended) else ""
            shares.append((f"{drawn / total:.2%}" if total else "-") + ended)
        table.add_row(row.name, *shares)
    return table


_MOST_BARS: Final = 10
"""Rows with a color of their own, as many as the palette has."""
_SMALLEST_LABEL: Final = 0.035
"""Share of the samples from which on an area has its name in it."""
_FAR: Final = 2.0
"""Limits above this multiple of the most epochs are marked at the edge."""
_REST_COLOR: Final = "0.8"
_LIMIT_COLOR: Final = "0.2"
_SUFFIXES: Final = (".svg", ".png", ".pdf")


def draw_plan(plan: "BlendPlan", path: str) -> None:
    """Plots the first split of a plan, which is training unless that has no data."""
    if Path(path).suffix not in _SUFFIXES:
        raise ArgumentError(
            f"{path}: a plot's name must end in {', '.join(_SUFFIXES)}, found {Path(path).suffix or 'no suffix'}"
        )
    require("matplotlib", where=f"{path}: a plot", extra="plot")
    from matplotlib.figure import Figure

    split = plan.splits[0]
    selection = largest_first(split, rows_of(split, members=False), _MOST_BARS)
    rows = len(selection.shown) + bool(selection.rest)
    figure = Figure(figsize=(11, 2.2 + 0.32 * rows), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    colors = _colors(selection)
    _draw_stages(left, split, selection, colors)
    _draw_epochs(right, split, selection, colors)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f'{split.split}: {compact(split.tokens)} tokens in {compact(split.samples)} samples, order "{plan.order}"'
    )
    figure.savefig(path, dpi=120)


def _colors(selection: RowSelection) -> list[Any]:
    from matplotlib import colormaps

    # Neighbours differ in hue: a palette of light and dark pairs would seem to group them.
    return [colormaps["tab10"](number % 10) for number in range(len(selection.shown))] + [_REST_COLOR]


def _on(color: Any) -> str:
    """Returns the color of a text on a color."""
    from matplotlib.colors import to_rgb

    return "0.15" if sum(to_rgb(color)) > 1.7 else "white"


def _rows(selection: RowSelection) -> list[Row]:
    rest = [Row(number_of(len(selection.rest), "other"), selection.rest_numbers)] if selection.rest else []
    return [*selection.shown, *rest]


def _draw_stages(axes: Any, split: "SplitPlan", selection: RowSelection, colors: list[Any]) -> None:
    """Plots the stacked shares of the samples over the tokens of the run."""
    tokens_a_sample = split.tokens // max(split.samples, 1)
    unit, name = _unit(split.tokens)
    for stage in split.stages:
        start, total, top = stage.first_sample * tokens_a_sample / unit, sum(stage.samples), 1.0
        width = (stage.stop_sample - stage.first_sample) * tokens_a_sample / unit
        for row, color in zip(_rows(selection), colors, strict=False):
            share = sum(stage.samples[number] for number in row.numbers) / max(total, 1)
            top -= share  # from the top, in the order of the bars in the other plot
            axes.bar(start, share, width, bottom=top, align="edge", color=color, edgecolor="white", linewidth=0.6)
            if share >= _SMALLEST_LABEL and width * unit * len(split.stages) >= split.tokens / 2:
                text = f"{_shortened(row.name)}  {share:.0%}" if len(split.stages) < 3 else f"{share:.0%}"
                axes.text(
                    start + width / 2, top + share / 2, text, ha="center", va="center", fontsize=8, color=_on(color)
                )
    axes.set(
        xlim=(0, max(split.tokens / unit, 1e-9)),
        ylim=(0, 1),
        xlabel=f"tokens of training{f' ({name})' if name else ''}" if split.split == "train" else f"tokens ({name})",
        title="Share of the samples" + (", by stage" if len(split.stages) > 1 else ""),
    )
    axes.yaxis.set_major_formatter(lambda share, _position: f"{share:.0%}")


def _draw_epochs(axes: Any, split: "SplitPlan", selection: RowSelection, colors: list[Any]) -> None:
    """Plots the epochs of each dataset, and their limits."""
    rows = _rows(selection)
    shown = [[split.datasets[number] for number in row.numbers] for row in rows]
    epochs = [_epochs_of(datasets) for datasets in shown]
    most = max([1.0, *epochs])
    limits = [_limit_of(datasets) for datasets in shown]
    edge = 1.3 * max([most, *(limit for limit in limits if limit <= _FAR * most)])
    for number, (datasets, color) in enumerate(zip(shown, colors, strict=False)):
        limit, ink = limits[number], "C3" if any(one.shortfall is not None for one in datasets) else "0.2"
        text = f" {epochs[number]:.2f}, {compact(sum(one.tokens_drawn for one in datasets))}"
        axes.barh(number, epochs[number], color=color)
        axes.text(epochs[number], number, text, va="center", fontsize=8, color=ink)
        if limit > edge:
            axes.text(edge, number, f"{limit:g} \u25b6", ha="right", va="center", fontsize=8, color=_LIMIT_COLOR)
        elif limit:
            axes.plot([limit, limit], [number - 0.42, number + 0.42], color=_LIMIT_COLOR, linewidth=2)
    axes.set_yticks(range(len(rows)), [_shortened(_title(row)) for row in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set(
        xlim=(0, edge),
        xlabel="epochs",
        title="Epochs and tokens" + (" (line, arrow: the limit; red: short)" if any(limits) else ""),
    )
    axes.axvline(1, color="0.6", linestyle=":", linewidth=1, zorder=0)


def _limit_of(datasets: "Sequence[DatasetPlan]") -> float:
    """Returns the most epochs of each dataset of a row; 0 if there is no limit, or several."""
    limits = {one.max_epochs for one in datasets}
    return (limits.pop() or 0.0) if len(limits) == 1 else 0.0


def _epochs_of(datasets: "Sequence[DatasetPlan]") -> float:
    """Returns the epochs that the draws of a row take."""
    if len(datasets) == 1:
        return datasets[0].epochs
    return sum(one.tokens_drawn for one in datasets) / max(sum(one.tokens for one in datasets), 1)


def _title(row: Row) -> str:
    """Returns the name of a row, with the number of its datasets if it has several."""
    return row.name if len(row.numbers) == 1 or row.name.endswith("others") else f"{row.name} ({len(row.numbers):,})"


def _unit(number: int) -> tuple[int, str]:
    """Returns the unit for counts of this size, and its name."""
    name = compact(number)[-1]
    units = {"K": (10**3, "thousands"), "M": (10**6, "millions"), "B": (10**9, "billions"), "T": (10**12, "trillions")}
    return units.get(name, (1, ""))


def _shortened(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:11]}..{name[-11:]}"
