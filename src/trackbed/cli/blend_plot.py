"""Plot of `trackbed blend --plot`: proportions by stage, and epochs by dataset, of training."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trackbed.cli.blend_table import RowSelection, compact, largest_first, rows_of
from trackbed.errors import ArgumentError

if TYPE_CHECKING:
    from trackbed.builder import BlendPlan
    from trackbed.builder.blend_file import SplitPlan
from trackbed.plural import number_of

__all__ = ["draw_plan"]

_MOST_BARS: Final = 11
_REST_COLOR: Final = "0.8"
_LIMIT_COLOR: Final = "0.2"
_SUFFIXES: Final = (".svg", ".png", ".pdf")


def draw_plan(plan: "BlendPlan", path: str) -> None:
    """Plots the first split of a plan, which is training unless that has no data.

    Raises:
        ArgumentError: the suffix of the file is that of no supported format, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if Path(path).suffix not in _SUFFIXES:
        msg = f"{path}: a plot's name must end in {', '.join(_SUFFIXES)}, found {Path(path).suffix or 'no suffix'}"
        raise ArgumentError(msg)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        msg = f"{path}: a plot needs matplotlib, which `pip install trackbed[plot]` installs, found none"
        raise ArgumentError(msg) from error
    split = plan.splits[0]
    selection = largest_first(split, rows_of(split, members=True), _MOST_BARS)
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

    return [colormaps["tab20"](number % 20) for number in range(len(selection.shown))] + [_REST_COLOR]


def _groups(selection: RowSelection) -> list[list[int]]:
    rest = [list(selection.rest_numbers)] if selection.rest else []
    return [list(row.numbers) for row in selection.shown] + rest


def _draw_stages(axes: Any, split: "SplitPlan", selection: RowSelection, colors: list[Any]) -> None:
    """Plots the stacked shares of the samples over the tokens of the run."""
    tokens_a_sample = split.tokens // max(split.samples, 1)
    unit, name = _unit(split.tokens)
    for stage in split.stages:
        start, total, top = stage.first_sample * tokens_a_sample / unit, sum(stage.samples), 1.0
        width = (stage.stop_sample - stage.first_sample) * tokens_a_sample / unit
        for group, color in zip(_groups(selection), colors, strict=False):
            share = sum(stage.samples[number] for number in group) / max(total, 1)
            top -= share  # from the top, in the order of the bars in the other plot
            axes.bar(start, share, width, bottom=top, align="edge", color=color, edgecolor="white", linewidth=0.6)
    axes.set(
        xlim=(0, max(split.tokens / unit, 1e-9)),
        ylim=(0, 1),
        xlabel=f"tokens of training{f' ({name})' if name else ''}" if split.split == "train" else f"tokens ({name})",
        title="Share of the samples" + (", by stage" if len(split.stages) > 1 else ""),
    )
    axes.yaxis.set_major_formatter(lambda share, _position: f"{share:.0%}")


def _draw_epochs(axes: Any, split: "SplitPlan", selection: RowSelection, colors: list[Any]) -> None:
    """Plots the epochs of each dataset, and their limits."""
    groups = _groups(selection)
    names, widest = [], 1.0
    for row, (group, color) in enumerate(zip(groups, colors, strict=False)):
        members = [split.datasets[number] for number in group]
        drawn = sum(one.tokens_drawn for one in members)
        epochs = members[0].epochs if len(members) == 1 else drawn / max(sum(one.tokens for one in members), 1)
        is_short = any(one.shortfall is not None for one in members)
        limit = members[0].max_epochs if len(members) == 1 else None
        axes.barh(row, epochs, color=color)
        axes.text(
            epochs, row, f" {epochs:.2f}, {compact(drawn)}", va="center", fontsize=8, color="C3" if is_short else "0.2"
        )
        if limit is not None:
            axes.plot([limit, limit], [row - 0.42, row + 0.42], color=_LIMIT_COLOR, linewidth=2)
        names.append(members[0].name if len(members) == 1 else number_of(len(members), "other"))
        widest = max(widest, epochs, limit or 0.0)
    axes.set_yticks(range(len(groups)), [_shortened(name) for name in names], fontsize=9)
    axes.invert_yaxis()
    has_limits = any(one.max_epochs is not None for one in split.datasets)
    axes.set(
        xlim=(0, widest * 1.3),
        xlabel="epochs",
        title="Epochs and tokens" + (" (line: the limit; red: short)" if has_limits else ""),
    )
    axes.axvline(1, color="0.6", linestyle=":", linewidth=1, zorder=0)


def _unit(number: int) -> tuple[int, str]:
    """Returns the unit for counts of this size, and its name."""
    name = compact(number)[-1]
    units = {"K": (10**3, "thousands"), "M": (10**6, "millions"), "B": (10**9, "billions"), "T": (10**12, "trillions")}
    return units.get(name, (1, ""))


def _shortened(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:11]}..{name[-11:]}"
