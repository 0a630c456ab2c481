"""The report as a page of HTML: sections of figures and tables, without scripts and without other files."""

import math
from collections.abc import Iterable
from typing import Final

from trackbed.plural import number_of
from trackbed.report.blend_section import blend_section
from trackbed.report.job_section import jobs_section
from trackbed.report.loss_sections import keys_section, loss_section, rows_section
from trackbed.report.markup import Html, element, join, short
from trackbed.report.numbers import count_text, duration, exact, percent
from trackbed.report.plan import ReportPlan
from trackbed.report.style import STYLE
from trackbed.report.tables import note
from trackbed.report.waits_section import waits_section

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Allows no request, should markup from the record ever get into the page."""


def page_of(plan: ReportPlan) -> str:
    """Returns the page of a report."""
    sections: list[tuple[str, str, Html]] = [
        ("summary", "Summary", _summary(plan)),
        ("loss", "Loss", loss_section(plan)),
        ("blend", "Tokens against the blend", blend_section(plan)),
        ("sources", "Loss by dataset", rows_section(plan)),
        ("jobs", "Start-up and restarts", jobs_section(plan)),
        ("waits", "Waits", waits_section(plan)),
    ]
    if plan.memory:
        sections.append(("memory", "Memory", keys_section("memory", plan.memory)))
    if plan.further:
        left_out = [note(f"Not drawn: {', '.join(map(short, plan.further_left_out))}")] if plan.further_left_out else []
        sections.append(("further", "Further values", join(keys_section("further", plan.further), *left_out)))
    title = f"Run {plan.name}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("link", rel="icon", href="data:,"),  # no request for an icon
        element("title", title),
        element("style", Html(STYLE)),
    )
    links = [element("li", element("a", heading, href=f"#{name}")) for name, heading, _ in sections]
    body = element(
        "body",
        element("header", element("h1", title), element("nav", element("ul", *links), aria_label="Sections")),
        element("main", *(_section(name, heading, content) for name, heading, content in sections)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _section(name: str, heading: str, content: Html) -> Html:
    title = element("h2", heading, id=f"{name}-heading")
    return join(Html("\n"), element("section", title, content, id=name, aria_labelledby=f"{name}-heading"))


def _summary(plan: ReportPlan) -> Html:
    facts = plan.summary
    stalls, saves, communication = facts.waits
    ranks = [f"{one:,}" for one in facts.ranks]
    shown_ranks = ", ".join(ranks) if len(ranks) <= 4 else f"{', '.join(ranks[:3])}, ..., {ranks[-1]}"
    time = ("at least " if not facts.is_time_complete else "") + duration(facts.known_seconds)
    items: list[tuple[str, str, str]] = [
        ("Steps", f"{facts.num_steps:,}", _range(facts.steps, facts.num_steps)),
        ("Samples", count_text(facts.samples), ""),
        ("Tokens", count_text(facts.tokens), ""),
        ("Ranks", shown_ranks or "-", "that read different samples"),
        ("Jobs", f"{facts.num_jobs:,}", number_of(max(0, facts.num_jobs - 1), "restart")),
        ("Time of the jobs", time if plan.jobs else "-", "from opening the run to the last event"),
        ("Last loss", exact(facts.last_loss), ""),
        ("Waited for batches", duration(stalls), _part(stalls, plan)),
        ("Waited for checkpoints", duration(saves), _part(saves, plan)),
        ("Waited for other ranks", duration(communication), _part(communication, plan)),
        ("Steps trained again", f"{facts.num_superseded:,}", _again(facts.num_superseded, facts.superseded_waits)),
    ]
    return join(element("dl", *_facts(items), class_="facts"), *map(note, _remarks(plan)))


def _facts(items: Iterable[tuple[str, str, str]]) -> list[Html]:
    return [
        element("div", element("dt", name), element("dd", value, *([element("small", more)] if more else [])))
        for name, value, more in items
    ]


def _range(steps: tuple[int, int] | None, count: int) -> str:
    return "" if steps is None or steps == (1, count) else f"from step {steps[0]:,} to {steps[1]:,}"


def _part(seconds: float, plan: ReportPlan) -> str:
    known = plan.summary.known_seconds
    if not plan.summary.is_time_complete or not known or seconds > known or math.isnan(seconds):
        return ""
    return f"{percent(seconds / known)} of the time of the jobs"


def _again(count: int, seconds: float) -> str:
    return f"in which {duration(seconds)} were waits" if count and seconds else ""


def _remarks(plan: ReportPlan) -> list[str]:
    if not plan.summary.num_steps:
        return ["The run has no steps yet."]
    killed = sum(job.closed is None for job in plan.jobs)
    return [f"{number_of(killed, 'job')} without a closing event: killed, or still at work."] if killed else []
