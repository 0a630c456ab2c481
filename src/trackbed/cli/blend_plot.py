"""Plot of `trackbed blend --plot`: proportions by stage, and epochs by dataset, of training."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trackbed.cli.blend_table import Row, RowSelection, compact, largest_first, rows_of
from trackbed.datasets.extras import require
from trackbed.errors import ArgumentError
from trackbed.plural import number_of

if TYPE_CHECKING:
    from trackbed.blends import BlendPlan, DatasetPlan, SplitPlan


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
