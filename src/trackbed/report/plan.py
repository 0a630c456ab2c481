"""Everything that the report of a run shows, as numbers: a pure function of the record.

Shapes: N lines of steps that count, R rows of the blend.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trackbed.blends.blend_file import BlendFile
from trackbed.ledger.record import BLEND, OPEN, RunRecord
from trackbed.plural import number_of
from trackbed.report.blend_shares import (
    Batches,
    Piece,
    Rows,
    StageShares,
    Wanted,
    batches_of,
    pieces_of,
    rows_of,
    shares,
    stages_of,
    wanted_of,
)
from trackbed.report.columns import (
    Curve,
    Floats,
    Integers,
    as_number,
    as_whole,
    bins_of,
    column,
    curve,
    numeric_keys,
    steps_of,
)
from trackbed.report.jobs import CLOSE, EVALUATION, Job, jobs_of

WAITS: Final = ("stall_seconds", "checkpoint_seconds", "communication_seconds")
_KNOWN_KEYS: Final = (
    *("step", "first_sample", "num_samples", "num_ranks", "loss", "datasets", "grad_norm", "batch_hash"),
    *WAITS,
)
MOST_ROWS: Final = 7
"""Rows with a line of their own in a picture; the rest are drawn as one."""
_MOST_KEYS: Final = 24
"""Further keys that are drawn."""
_MOST_SHARE_BINS: Final = 100
_STEPS_A_BIN: Final = 3


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Contents of the folder of a run."""

    name: str
    record: RunRecord
    lines_before: Sequence[int]
    """Number of lines of steps before each event "begin"."""
    blend_files: Mapping[str, BlendFile | str]
    """The copies of blend files, by the name that events have for them; or the reason why one cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals of a run, of the steps that count unless a field says otherwise."""

    num_steps: int
    steps: tuple[int, int] | None
    """First and last step; None for a run without steps."""
    samples: int
    tokens: int
    ranks: tuple[int, ...]
    """All numbers of ranks that steps have had, in the order of their first steps."""
    num_jobs: int
    num_superseded: int
    """Lines of steps that were trained again."""
    superseded_waits: float
    """Seconds for which these have waited."""
    known_seconds: float
    """Seconds of the jobs, each from its event "open" to its last event."""
    is_time_complete: bool
    """True if every job has a closing event."""
    last_loss: float
    waits: tuple[float, float, float]
    """Seconds in stalls, checkpoints and communication."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation that no later job has superseded."""

    step: int
    split: str
    loss: float
    of_datasets: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RowCurve:
    """Numbers of a row of the blend over the steps; the last may combine several rows."""

    name: str
    tokens: int
    x: Floats
    consumed: Floats
    """Share of the tokens in each bin."""
    wanted: Floats | None
    """Share that the blend wants in each bin."""
    loss: Curve | None


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """Steps whose duration follows from the times of two events, and their waits."""

    job: int
    """Number of the job, from 1 on."""
    first_step: int
    last_step: int
    seconds: float
    waits: tuple[float, float, float]


@dataclass(frozen=True, slots=True, eq=False)
class ReportPlan:
    """The numbers of a report."""

    name: str
    notes: tuple[str, ...]
    """Reasons why shares of the blend are not known."""
    summary: Summary
    jobs: Sequence[Job]
    loss: Curve | None
    grad_norm: Curve | None
    samples_at: Sequence[tuple[int, float, float, int]]
    """Step, loss, norm of the gradients and samples of some lines."""
    evaluations: Sequence[Evaluation]
    rows: Rows
    stages: Sequence[StageShares]
    row_curves: Sequence[RowCurve]
    waits: tuple[Curve | None, Curve | None, Curve | None]
    """Stalls, checkpoints and communication; of checkpoints only the steps that waited."""
    paces: Sequence[Pace]
    memory: Mapping[str, Curve]
    further: Mapping[str, Curve]
    further_left_out: Sequence[str]
    """Keys that are not drawn, as there are too many."""


def plan_report(inputs: RunInputs) -> ReportPlan:
    """Computes the numbers of a report."""
    record = inputs.record
    lines, steps = record.steps, steps_of(record.steps)
    jobs = jobs_of(record.events, inputs.lines_before, len(lines) + len(record.superseded))
    batches = batches_of(lines)
    loss, grad_norm = column(lines, "loss"), column(lines, "grad_norm")
    waits = tuple(column(lines, key) for key in WAITS)
    rows, wanted, notes = _blend(inputs, batches)
    num_samples = column(lines, "num_samples")
    stages, _ = stages_of(wanted, batches, rows, steps, num_samples)
    stalls, saves, communication = waits
    has_saved = saves > 0
    drawn, left_out = _further(lines, steps)
    return ReportPlan(
        name=inputs.name,
        notes=notes,
        summary=_summary(record, steps, jobs, batches, num_samples, waits),
        jobs=jobs,
        loss=curve(steps, loss),
        grad_norm=curve(steps, grad_norm),
        samples_at=[
            (int(steps[place]), float(loss[place]), float(grad_norm[place]), int(np.nan_to_num(num_samples[place])))
            for place in (np.linspace(0, len(lines) - 1, min(len(lines), 25), dtype=np.int64) if lines else [])
        ],
        evaluations=_evaluations(record.events, inputs.lines_before, len(lines) + len(record.superseded)),
        rows=rows,
        stages=stages,
        row_curves=_row_curves(rows, wanted, batches, steps),
        waits=(curve(steps, stalls), curve(steps[has_saved], saves[has_saved]), curve(steps, communication)),
        paces=_paces(jobs, steps, waits),
        memory={key: one for key, one in drawn.items() if _is_memory(key)},
        further={key: one for key, one in drawn.items() if not _is_memory(key)},
        further_left_out=left_out,
    )


def _summary(
    record: RunRecord,
    steps: Integers,
    jobs: Sequence[Job],
    batches: Batches,
    num_samples: Floats,
    waits: Sequence[Floats],
) -> Summary:
    losses = [as_number(line.get("loss")) for line in record.steps[-1:]]
    seconds = [job.known_seconds for job in jobs]
    stalls, saves, communication = (float(np.nansum(one)) for one in waits)
    ranks = dict.fromkeys(as_whole(line.get("num_ranks")) for line in record.steps)
    return Summary(
        num_steps=len(record.steps),
        steps=None if not len(steps) else (int(steps.min()), int(steps.max())),
        samples=int(np.nansum(num_samples)),
        tokens=int(batches.tokens.sum()),
        ranks=tuple(one for one in ranks if one is not None),
        num_jobs=len(jobs),
        num_superseded=len(record.superseded),
        superseded_waits=float(sum(np.nansum(column(record.superseded, key)) for key in WAITS)),
        known_seconds=sum(one for one in seconds if one is not None),
        is_time_complete=all(job.marks and job.marks[-1].kind == CLOSE for job in jobs) and None not in seconds,
        last_loss=losses[0] if losses else math.nan,
        waits=(stalls, saves, communication),
    )


def _evaluations(events: Sequence[Mapping[str, Any]], lines_before: Sequence[int], num_lines: int) -> list[Evaluation]:
    """Returns the evaluations, without those of steps that were trained again."""
    found: list[Evaluation] = []
    begins = iter(lines_before)
    for event in events:
        if event.get("event") == "begin" and next(begins) < num_lines:
            found = [one for one in found if one.step <= int(event["after_step"])]
        step = as_whole(event.get("step"))
        if event.get("event") == EVALUATION and step is not None:
            losses = event.get("datasets")
            of_datasets = tuple(as_number(one) for one in losses) if isinstance(losses, list) else ()
            found.append(Evaluation(step, str(event.get("split", "")), as_number(event.get("loss")), of_datasets))
    return found


def _blend(inputs: RunInputs, batches: Batches) -> tuple[Rows, Wanted, tuple[str, ...]]:
    """Returns the rows of the blend, the shares wanted, and what is not known of them."""
    record = inputs.record
    places: dict[int, int] = {}
    group = np.array([places.setdefault(id(job), len(places)) for job in record.jobs], dtype=np.int64)
    jobs = list({id(job): job for job in record.jobs}.values())
    latest = jobs[-1] if jobs else _last_opened(record.events)
    files = {name: file for name, file in inputs.blend_files.items() if isinstance(file, BlendFile)}
    prefixes = _prefixes(latest)
    num_datasets = int(batches.dataset.max(initial=-1)) + 1
    rows = rows_of(prefixes, files.get(str(latest.get("blend"))), num_datasets)
    groups = [pieces_of(job, files.get(str(job.get("blend"))), rows) for job in jobs]
    notes = [f"{name}: {reason}" for name, reason in inputs.blend_files.items() if isinstance(reason, str)]
    unknown = int(np.isin(group, [number for number, one in enumerate(groups) if not one]).sum())
    if unknown:
        notes.append(f"{number_of(unknown, 'step')} without known shares: {_reason(jobs, groups, files)}")
    if any(prefixes[: len(own)] != own for own in map(_prefixes, jobs)):
        notes.append("an earlier job numbers its datasets otherwise; rows have the numbers of the last job")
    lines = record.steps
    return rows, wanted_of(column(lines, "first_sample"), column(lines, "num_samples"), group, groups), tuple(notes)


def _reason(
    jobs: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[Piece]], files: Mapping[str, BlendFile]
) -> str:
    job = next(job for job, pieces in zip(jobs, groups, strict=True) if not pieces)
    if job.get("stages") is not None:
        return "the event 'blend' has other stages than docs/formats/run.md says"
    if str(job.get("blend")) not in files:
        return "there is no blend file to read"
    return "the blend file does not give the shares by `weight` alone, or has other datasets than the job"


def _last_opened(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return next((event for event in reversed(events) if event.get("event") in (OPEN, BLEND)), {})


def _prefixes(job: Mapping[str, Any]) -> list[str]:
    found = job.get("datasets")
    return [str(one) for one in found] if isinstance(found, list) else []


def _row_curves(rows: Rows, wanted: Wanted, batches: Batches, steps: Integers) -> list[RowCurve]:
    """Returns the rows with the most tokens, and the others as one."""
    if not len(batches.line):
        return []
    row = np.array(rows.of_dataset, dtype=np.int64)[batches.dataset]
    totals = np.bincount(row, batches.tokens, len(rows.names))
    largest = np.argsort(-totals, kind="stable")
    num_shown = len(largest) if len(largest) <= MOST_ROWS + 1 else MOST_ROWS
    shown = sorted(largest[:num_shown].tolist())
    names = [rows.names[number] for number in shown]
    if num_shown < len(largest):
        names.append(number_of(len(largest) - num_shown, "other"))
    place = np.full(len(rows.names), len(shown), dtype=np.int64)
    place[shown] = np.arange(len(shown))
    own = place[row]
    num_bins = min(_MOST_SHARE_BINS, max(1, len(steps) // _STEPS_A_BIN))
    bins = bins_of(steps, num_bins)
    x = np.bincount(bins, steps, num_bins) / np.maximum(np.bincount(bins, minlength=num_bins), 1)
    tokens = np.bincount(bins[batches.line] * len(names) + own, batches.tokens, num_bins * len(names))
    consumed = _known_shares(tokens.astype(np.float64).reshape(num_bins, len(names)))
    amounts = wanted.by(bins, num_bins, len(rows.names))
    by_name = np.zeros((num_bins, len(names)), dtype=np.float64)
    for number, amount in zip(place.tolist(), amounts.T, strict=True):
        by_name[:, number] += amount
    wanted_shares = _known_shares(by_name) if len(wanted.pieces) else None
    return [
        RowCurve(
            name=name,
            tokens=int(totals[place == number].sum()),
            x=x,
            consumed=consumed[:, number],
            wanted=None if wanted_shares is None else wanted_shares[:, number],
            loss=_loss_of(batches, own == number, steps),
        )
        for number, name in enumerate(names)
    ]


def _known_shares(amounts: Floats) -> Floats:
    found = shares(amounts)
    found[amounts.sum(axis=1) <= 0] = np.nan
    return found


def _loss_of(batches: Batches, selected: np.ndarray[Any, np.dtype[np.bool_]], steps: Integers) -> Curve | None:
    """Returns the mean loss of some datasets over the steps that have them, weighted by tokens."""
    known = np.flatnonzero(selected & ~np.isnan(batches.loss) & (batches.tokens > 0))
    if not len(known):
        return None
    line, tokens = batches.line[known], batches.tokens[known].astype(np.float64)
    lines, place = np.unique(line, return_inverse=True)
    losses = np.bincount(place, batches.loss[known] * tokens) / np.bincount(place, tokens)
    return curve(steps[lines], losses)


def _paces(jobs: Sequence[Job], steps: Integers, waits: Sequence[Floats]) -> list[Pace]:
    found = []
    for number, job in enumerate(jobs, start=1):
        for segment in job.segments:
            if segment.pace is None:
                continue
            first, last, seconds = segment.pace
            lines = slice(*np.searchsorted(steps, [first, last + 1]).tolist())
            stalls, saves, communication = (float(np.nansum(one[lines])) for one in waits)
            found.append(Pace(number, first, last, seconds, (stalls, saves, communication)))
    return found


def _further(lines: Sequence[Mapping[str, Any]], steps: Integers) -> tuple[dict[str, Curve], list[str]]:
    """Returns the curves of keys that the program has given, memory first, and the keys left out."""
    keys = sorted(numeric_keys(lines, known=_KNOWN_KEYS), key=lambda key: not _is_memory(key))
    found = {key: one for key in keys[:_MOST_KEYS] if (one := curve(steps, column(lines, key))) is not None}
    return found, keys[_MOST_KEYS:]


def _is_memory(key: str) -> bool:
    return "memory" in key.lower() or key.endswith("_bytes")
