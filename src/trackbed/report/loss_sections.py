"""Sections of the losses, by step and by dataset, and of further values of the steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from trackbed.plural import number_of
from trackbed.report.captions import band_note, describe, line_of, restart_item, restarts_of, row_items, style_of
from trackbed.report.columns import Curve
from trackbed.report.markup import Html, element, join, short
from trackbed.report.numbers import byte_unit, exact
from trackbed.report.plan import Evaluation, ReportPlan
from trackbed.report.svg import (
    NUM_STYLES,
    Chart,
    Line,
    Points,
    draw_chart,
    figure,
    legend,
    swatch,
)
from trackbed.report.tables import beside, curve_table, folded, most_rows, note, table

_MOST_TABLE_ROWS: Final = 60


def loss_section(plan: ReportPlan) -> Html:
    """Returns the loss over the steps with the evaluations, and the norm of the gradients."""
    figures = []
    evaluations = _evaluation_points(plan.evaluations)
    lines = [] if plan.loss is None else [line_of("loss of training", plan.loss, 0)]
    if lines or evaluations:
        chart = Chart(
            name="loss-picture",
            title="Loss over steps",
            description=describe("Loss of training", plan.loss, evaluations),
            lines=lines,
            points=evaluations,
            marks=restarts_of(plan),
            steps=plan.summary.steps,
        )
        items = [(line.label, swatch(line.label, 0)) for line in lines]
        items += [(points.label, swatch(points.label, points.style, "point")) for points in evaluations]
        figures.append(figure("Loss", draw_chart(chart), legend(items + restart_item(plan)), *band_note(plan.loss)))
    if plan.grad_norm is not None:
        chart = Chart(
            name="norm-picture",
            title="Norm of the gradients over steps",
            description=describe("Norm of the gradients", plan.grad_norm),
            lines=[line_of("norm of the gradients", plan.grad_norm, 2)],
            marks=restarts_of(plan),
            steps=plan.summary.steps,
            from_zero=True,
            may_be_log=True,
        )
        figures.append(figure("Norm of the gradients", draw_chart(chart), *band_note(plan.grad_norm)))
    named = {"loss": plan.loss, "norm of the gradients": plan.grad_norm}
    known = {name: one for name, one in named.items() if one is not None}
    missing = [note(f"No step has a known {name}.") for name, one in named.items() if one is None]
    rows = [(f"{step:,}", exact(loss), exact(norm), f"{samples:,}") for step, loss, norm, samples in plan.samples_at]
    some = table("Some steps", ("step", "loss", "norm of the gradients", "samples"), rows)
    return join(
        element("div", *figures, class_="grid"),
        *missing,
        *([curve_table("Loss and norm of the gradients", known)] if known else []),
        *_evaluation_table(plan.evaluations),
        *([folded("Numbers of some steps", some)] if rows else []),
    )


def _evaluation_points(evaluations: Sequence[Evaluation]) -> list[Points]:
    splits = list(dict.fromkeys(one.split for one in evaluations if not math.isnan(one.loss)))
    found = []
    for number, split in enumerate(splits[: NUM_STYLES - 1]):
        own = [one for one in evaluations if one.split == split and not math.isnan(one.loss)]
        x, y = (np.array(one, dtype=np.float64) for one in ([one.step for one in own], [one.loss for one in own]))
        found.append(Points(f"evaluation of {short(split) or 'no split'}", x, y, number + 1))
    return found


def _evaluation_table(evaluations: Sequence[Evaluation]) -> list[Html]:
    if not evaluations:
        return [note("No evaluation is recorded.")]
    width = min(12, max(len(one.of_datasets) for one in evaluations))
    rows = [
        (
            f"{one.step:,}",
            short(one.split),
            exact(one.loss),
            *map(exact, (*one.of_datasets[:width], *[math.nan] * (width - len(one.of_datasets)))),
        )
        for one in evaluations
    ]
    kept, notes = most_rows(rows, _MOST_TABLE_ROWS, "evaluation")
    head = ("step", "split", "loss", *(f"dataset {number}" for number in range(width)))
    return [folded(number_of(len(rows), "evaluation"), table("Evaluations", head, kept, texts=(1,)), *notes)]


def rows_section(plan: ReportPlan) -> Html:
    """Returns the loss of each dataset over the steps."""
    known = {place: one for place, one in enumerate(plan.row_curves) if one.loss is not None}
    if not known:
        return note("Losses by dataset are not recorded: a program gives them with one loss for each sample.")
    curves = {short(one.name): one.loss for one in known.values() if one.loss is not None}
    chart = Chart(
        name="sources-picture",
        title="Loss by dataset, over steps",
        description=" ".join(describe(f"{name}:", one) for name, one in curves.items()),
        lines=[
            line_of(short(one.name), one.loss, style_of(place)) for place, one in known.items() if one.loss is not None
        ],
        marks=restarts_of(plan),
        steps=plan.summary.steps,
    )
    items = [item for place, item in enumerate(row_items(plan.row_curves)) if place in known]
    picture = figure("Loss by dataset", draw_chart(chart), legend(items + restart_item(plan)))
    return beside(picture, curve_table("Loss by dataset", curves))


def keys_section(name: str, curves: Mapping[str, Curve]) -> Html:
    """Returns a small plot of each key that the program has given; sizes in bytes have a binary unit."""
    figures = []
    tables = []
    for number, (key, one) in enumerate(curves.items()):
        in_bytes = key.endswith("_bytes")
        scale, unit = byte_unit(one.highest.value) if in_bytes else (1.0, "")
        label = f"{short(key)}{f' ({unit})' if unit else ''}"
        low, high = (None if band is None else band / scale for band in (one.low, one.high))
        chart = Chart(
            name=f"{name}-picture-{number}",
            title=f"{label} over steps",
            description=describe(f"{label}:", one, scale=scale),
            lines=[Line(label, one.x, one.mean / scale, low, high, style=0)],
            from_zero=in_bytes,
            may_be_log=not in_bytes,
        )
        figures.append(figure(label, draw_chart(chart)))
        tables.append(curve_table(label, {label: one}, scale))
    return join(element("div", *figures, class_="grid small"), folded("Exact numbers", *tables))
