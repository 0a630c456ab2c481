"""Section of the jobs of a run: start-up, time, and restarts."""

from collections.abc import Sequence
from typing import Any, Final

from trackbed.plural import number_of
from trackbed.report.jobs import CLOSE, Job
from trackbed.report.markup import Html, element, join, short
from trackbed.report.numbers import duration, moment, time_unit
from trackbed.report.plan import ReportPlan
from trackbed.report.svg import Row, Span, draw_rows, figure, legend, swatch
from trackbed.report.tables import most_rows, note, table

_MOST_TABLE_ROWS: Final = 60
_MOST_JOBS_DRAWN: Final = 30
_EVENT_STYLES: Final = {"evaluation": 2, "blend": 3, "refused": 6, CLOSE: 1}
"""Markers of kinds of events; other kinds have the last one."""
_HEAD: Final = (
    *("job", "host", "process", "processes", "version", "opened (UTC)", "start-up", "last event (UTC)", "closed"),
    *("steps", "recorded", "trained again"),
)


def jobs_section(plan: ReportPlan) -> Html:
    """Returns the start-up of each job, the jobs over time, and the steps that each has recorded."""
    if not plan.jobs:
        return note("No event is recorded.")
    numbered = list(enumerate(plan.jobs, start=1))[-_MOST_JOBS_DRAWN:]
    figures = [*_startup_figure(numbered), *_time_figure(numbered), *_steps_figure(numbered)]
    left = len(plan.jobs) - len(numbered)
    kept, notes = most_rows(
        [_job_cells(number, job) for number, job in enumerate(plan.jobs, start=1)], _MOST_TABLE_ROWS, "job"
    )
    return join(
        element("div", *figures, class_="grid"),
        *([note(f"The pictures show the last {len(numbered)} of {len(plan.jobs):,} jobs.")] if left else []),
        note(
            "Start-up is the time from the event 'open' to the event 'begin', which is written when the first step is "
            "recorded. Lines of steps have no time."
        ),
        table("Jobs", _HEAD, kept, texts=(1, 4, 5, 7, 8, 9)),
        *notes,
    )


def _startup_figure(jobs: Sequence[tuple[int, Job]]) -> list[Html]:
    known = [(number, job, job.startup_seconds) for number, job in jobs]
    rows = [
        Row(f"job {number}", [Span(0.0, seconds, "kept", f"job {number}: {duration(seconds)}")])
        for number, _, seconds in known
        if seconds is not None and seconds >= 0
    ]
    if not rows:
        return [note("No job has the times of the events 'open' and 'begin'.")]
    text = "Seconds until the first step was recorded. " + ". ".join(row.spans[0].text for row in rows[-8:]) + "."
    title = "Start-up of each job"
    picture = draw_rows("startup-picture", title, text, rows, x_label="seconds since the run was opened")
    return [figure("Start-up: opening the run to the first step recorded", picture)]


def _time_figure(jobs: Sequence[tuple[int, Job]]) -> list[Html]:
    known = [(number, job) for number, job in jobs if job.opened is not None and job.last_time is not None]
    if not known:
        return []
    origin = min(job.opened or 0.0 for _, job in known)
    unit, name = time_unit(max(job.last_time or 0.0 for _, job in known) - origin)
    rows = []
    for number, job in known:
        start, stop = ((time or 0.0) - origin for time in (job.opened, job.last_time))
        began = stop if job.began is None else max(start, job.began - origin)
        texts = (f"job {number}: start-up", f"job {number}: steps, {duration(max(0.0, stop - began))}")
        spans = [Span(start / unit, began / unit, "open", texts[0]), Span(began / unit, stop / unit, "kept", texts[1])]
        marks = [
            ((mark.time - origin) / unit, _EVENT_STYLES.get(mark.kind, 7), f"{short(mark.kind)} {moment(mark.time)}")
            for mark in job.marks
            if mark.kind not in ("open", "begin") and mark.time is not None and mark.time >= origin
        ]
        rows.append(Row(f"job {number}", spans, marks))
    text = f"{number_of(len(rows), 'job')} over time, from {moment(origin)} UTC on."
    picture = draw_rows("time-picture", "Jobs over time", text, rows, x_label=f"{name} since {moment(origin)} UTC")
    kinds = {mark.kind for _, job in known for mark in job.marks}
    items = [("start-up", swatch("start-up", 0, "open")), ("steps", swatch("steps", 0, "kept"))]
    items += [(kind, swatch(kind, style, "point")) for kind, style in _EVENT_STYLES.items() if kind in kinds]
    if kinds - _EVENT_STYLES.keys() - {"open", "begin"}:
        items.append(("other events", swatch("other events", 7, "point")))
    return [figure("Jobs over time", picture, legend(items))]


def _steps_figure(jobs: Sequence[tuple[int, Job]]) -> list[Html]:
    rows = []
    for number, job in jobs:
        spans = []
        for segment in job.segments:
            kept = segment.last_step - segment.num_superseded
            if kept > segment.after_step:
                text = f"job {number}: steps {segment.after_step + 1:,} to {kept:,}"
                spans.append(Span(segment.after_step, kept, "kept", text))
            if segment.num_superseded:
                text = f"job {number}: steps {kept + 1:,} to {segment.last_step:,}, trained again"
                spans.append(Span(kept, segment.last_step, "again", text))
        if spans:
            rows.append(Row(f"job {number}", spans))
    if not rows:
        return []
    text = ". ".join(span.text for row in rows[-8:] for span in row.spans[:4]) + "."
    picture = draw_rows("steps-picture", "Steps of each job", text, rows, x_label="step")
    items = [("steps that count", swatch("steps that count", 0, "kept"))]
    if any(span.kind == "again" for row in rows for span in row.spans):
        items.append(("trained again by a later job", swatch("steps trained again", 0, "again")))
    return [figure("Restarts along the steps", picture, legend(items))]


def _job_cells(number: int, job: Job) -> tuple[str, ...]:
    def known(key: str) -> str:
        value: Any = job.fields.get(key)
        return "-" if value is None else short(str(value), 60)

    ranges = [f"{one.after_step + 1:,} to {one.last_step:,}" for one in job.segments]
    shown = ranges if len(ranges) <= 4 else [*ranges[:2], "...", ranges[-1]]
    return (
        str(number),
        *(known(key) for key in ("host", "process", "num_ranks", "trackbed")),
        moment(job.opened),
        "-" if job.startup_seconds is None else duration(job.startup_seconds),
        moment(job.last_time),
        "yes" if job.closed is not None else "no",
        ", ".join(shown) or "-",
        f"{job.num_steps:,}",
        f"{job.num_superseded:,}",
    )
