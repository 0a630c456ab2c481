"""Section of the shares that the blend wants, and of those consumed."""

import math
from typing import Final

import numpy as np

from trackbed.plural import number_of
from trackbed.report.blend_shares import StageShares
from trackbed.report.captions import restart_item, restarts_of, row_items, style_of
from trackbed.report.columns import spread
from trackbed.report.markup import Html, join, short
from trackbed.report.numbers import count_text, percent
from trackbed.report.plan import ReportPlan
from trackbed.report.svg import (
    Chart,
    Line,
    draw_chart,
    figure,
    legend,
    swatch,
)
from trackbed.report.tables import beside, most_rows, note, table

_MOST_TABLE_ROWS: Final = 60
_MOST_STAGES: Final = 40


def blend_section(plan: ReportPlan) -> Html:
    """Returns the shares that the blend wants and those consumed, over the steps and by stage."""
    remarks = [note(f"Missing: {one}.") for one in plan.notes]
    if not plan.row_curves:
        return join(note("No step has tokens by dataset."), *remarks)
    lines = [
        Line(f"{short(one.name)}, wanted", one.x, 100 * one.wanted, style=style_of(place), is_wanted=True)
        for place, one in enumerate(plan.row_curves)
        if one.wanted is not None
    ]
    lines += [
        Line(short(one.name), one.x, 100 * one.consumed, style=style_of(place))
        for place, one in enumerate(plan.row_curves)
    ]
    parts = [f"{short(one.name)} {count_text(one.tokens)} tokens" for one in plan.row_curves]
    chart = Chart(
        name="shares-picture",
        title="Share of the tokens by dataset, over steps",
        description=f"Shares consumed, and shares wanted as dashed lines. In all: {', '.join(parts)}.",
        lines=lines,
        marks=restarts_of(plan),
        steps=plan.summary.steps,
        from_zero=True,
    )
    items = row_items(plan.row_curves)
    if any(line.is_wanted for line in lines):
        items.append(("wanted by the blend", swatch("shares wanted", 7, "wanted")))
    picture = figure("Share of the tokens (%)", draw_chart(chart), legend(items + restart_item(plan)))
    shown = [plan.stages[number] for number in spread(len(plan.stages), _MOST_STAGES)]
    left = len(plan.stages) - len(shown)
    tables = [_stage_table(plan, stage) for stage in shown]
    explanation = note(
        "A step counts for the stage of its first sample. The share wanted is that of the samples of these steps; "
        "on a ramp it is the integral of the ramp over them. The last column is the difference in tokens."
    )
    left_out = [note(f"{number_of(left, 'stage')} left out.")] if left else []
    return join(*remarks, beside(picture, explanation, *tables, *left_out))


def _stage_table(plan: ReportPlan, stage: StageShares) -> Html:
    total = int(stage.tokens.sum())
    wanted = stage.wanted
    rows = []
    for row in np.argsort(-stage.tokens, kind="stable").tolist():
        tokens = int(stage.tokens[row])
        share = math.nan if wanted is None else float(wanted[row])
        if not tokens and not share > 0:
            continue
        consumed = tokens / total if total else math.nan
        difference = "-" if math.isnan(share) else f"{round(tokens - share * total):+,}".replace("+0", "0")
        rows.append((short(plan.rows.names[row]), percent(share), percent(consumed), f"{tokens:,}", difference))
    kept, notes = most_rows(rows, _MOST_TABLE_ROWS, "dataset")
    head = ("dataset", "wanted", "consumed", "tokens", "above wanted")
    name = "Steps without known shares" if wanted is None else f"Stage from sample {stage.first_sample or 0:,}"
    where = f"{name}{' (ramp)' if stage.is_ramp else ''}: steps {stage.first_step:,} to {stage.last_step:,}"
    return join(table(f"{where}, {number_of(stage.samples, 'sample')}", head, kept), *notes)
