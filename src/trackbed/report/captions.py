"""Parts that figures of several sections have: lines, legends, and text alternatives."""

from collections.abc import Sequence

from trackbed.plural import number_of
from trackbed.report.columns import Curve
from trackbed.report.markup import Html, short
from trackbed.report.numbers import exact
from trackbed.report.plan import MOST_ROWS, ReportPlan, RowCurve
from trackbed.report.svg import NUM_STYLES, Line, Points, swatch
from trackbed.report.tables import note


def line_of(label: str, one: Curve, style: int) -> Line:
    """Returns the line of a curve."""
    return Line(label, one.x, one.mean, one.low, one.high, style=style)


def style_of(place: int) -> int:
    """Style of a row; the one that combines the others is grey."""
    return place if place < MOST_ROWS else NUM_STYLES - 1


def row_items(rows: Sequence[RowCurve]) -> list[tuple[str, Html]]:
    """Returns the items of a legend for rows of the blend."""
    return [(short(one.name), swatch(short(one.name), style_of(place))) for place, one in enumerate(rows)]


def restarts_of(plan: ReportPlan) -> list[tuple[float, str]]:
    """Returns the places along the steps at which later jobs begin."""
    return [
        (job.segments[0].after_step + 0.5, f"job {number} begins after step {job.segments[0].after_step:,}")
        for number, job in enumerate(plan.jobs, start=1)
        if number > 1 and job.segments
    ]


def restart_item(plan: ReportPlan) -> list[tuple[str, Html]]:
    """Returns the item of a legend for restarts, if there are any."""
    return [("restart", swatch("restarts", 0, "restart"))] if restarts_of(plan) else []


def band_note(one: Curve | None) -> list[Html]:
    """Returns a note on the band of a curve, if it has one."""
    if one is None or one.low is None:
        return []
    return [note("Each point is the mean of several steps; the band reaches from their lowest value to their highest.")]


def describe(what: str, one: Curve | None, points: Sequence[Points] = (), *, scale: float = 1.0) -> str:
    """Returns the text alternative of a curve, and of single values.

    Args:
        what: beginning of the text.
        one: the curve.
        points: the values.
        scale: divisor of the values of the curve.
    """
    parts = [what]
    if one is not None:
        parts.append(
            f"from {exact(one.first.value / scale)} at step {one.first.step:,} "
            f"to {exact(one.last.value / scale)} at step {one.last.step:,}, "
            f"lowest {exact(one.lowest.value / scale)} at step {one.lowest.step:,}, "
            f"highest {exact(one.highest.value / scale)} at step {one.highest.step:,}."
        )
    parts += [f"{number_of(len(one.x), one.label, f'values: {one.label}')}." for one in points]
    return " ".join(parts)
