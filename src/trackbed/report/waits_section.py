"""Section of the seconds for which steps have waited."""

from typing import Final

import numpy as np

from trackbed.report.captions import band_note, describe, line_of, restart_item, restarts_of
from trackbed.report.markup import Html, element, join
from trackbed.report.numbers import duration
from trackbed.report.plan import ReportPlan
from trackbed.report.svg import Chart, Points, draw_chart, figure, legend, swatch
from trackbed.report.tables import curve_table, most_rows, note, table

_MOST_TABLE_ROWS: Final = 60


def waits_section(plan: ReportPlan) -> Html:
    """Returns the seconds for which steps have waited, and their part of the time of a step."""
    names = ("batches", "checkpoints", "other ranks")
    stalls, saves, communication = plan.waits
    lines = [
        line_of(f"waited for {name}", one, style)
        for name, one, style in ((names[0], stalls, 0), (names[2], communication, 1))
        if one is not None
    ]
    figures = []
    if lines:
        chart = Chart(
            name="waits-picture",
            title="Seconds for which steps waited for batches and for other ranks",
            description=" ".join(
                describe(f"Seconds for {name}:", one) for name, one in ((names[0], stalls), (names[2], communication))
            ),
            lines=lines,
            marks=restarts_of(plan),
            steps=plan.summary.steps,
            from_zero=True,
        )
        items = [(line.label, swatch(line.label, line.style)) for line in lines] + restart_item(plan)
        bands = band_note(stalls if stalls is not None else communication)
        figures.append(figure("Waits for batches and other ranks (seconds)", draw_chart(chart), legend(items), *bands))
    if saves is not None:
        y = saves.mean if saves.high is None else saves.high
        known = ~np.isnan(y)
        chart = Chart(
            name="saves-picture",
            title="Seconds for which steps waited for checkpoints",
            description=describe("Seconds for checkpoints:", saves),
            bars=[Points("seconds", saves.x[known], y[known], 4)],
            marks=restarts_of(plan),
            steps=plan.summary.steps,
            from_zero=True,
        )
        caption = "Waits for checkpoints (seconds)" + (", longest of several" if saves.high is not None else "")
        figures.append(figure(caption, draw_chart(chart)))
    else:
        figures.append(note("No step has waited for a checkpoint."))
    known_curves = {name: one for name, one in zip(names, plan.waits, strict=True) if one is not None}
    missing = [] if lines else [note("No step has the seconds for which it waited.")]
    numbers = [curve_table("Seconds waited in a step, for", known_curves)] if known_curves else []
    return join(element("div", *figures, class_="grid"), *missing, *numbers, *_paces(plan))


def _paces(plan: ReportPlan) -> list[Html]:
    if not plan.paces:
        return [note("The time of a step is not known: no event after the first step of a job has a step and a time.")]
    head = ("job", "steps", "time", "time of a step", "waited for batches", "for checkpoints", "for other ranks")
    rows = []
    for pace in plan.paces:
        count = pace.last_step - pace.first_step + 1
        parts = [f"{duration(one)} ({one / pace.seconds:.1%})" for one in pace.waits]
        steps = f"{pace.first_step:,} to {pace.last_step:,}"
        rows.append((str(pace.job), steps, duration(pace.seconds), duration(pace.seconds / count), *parts))
    kept, notes = most_rows(rows, _MOST_TABLE_ROWS, "row")
    remark = note(
        "The time of a step is the time between two events of a job, divided by the steps between them; it includes "
        "evaluations."
    )
    return [table("Waits as part of the time of the steps", head, kept, texts=(1,)), *notes, remark]
