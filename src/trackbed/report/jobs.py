"""Jobs of a run, from its events: when each opened the run and began, and which steps it recorded.

A line of `steps.jsonl` has no time, so the times of a job are those of its events.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trackbed.ledger.record import BEGIN, OPEN
from trackbed.report.columns import as_number, as_whole

CLOSE: Final = "close"
"""Event of a job that has closed the run."""
EVALUATION: Final = "evaluation"
_MOST_STEPS: Final = 2**53
"""Steps up to which a float is exact."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An event of a job."""

    kind: str
    time: float | None
    """Seconds since 1970."""
    step: int | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive steps that a job recorded after one of its begin events."""

    after_step: int
    num_steps: int
    num_superseded: int = 0
    """The last of these steps, which were trained again."""
    begin_time: float | None = None
    """Time at which the first step was recorded."""
    pace: tuple[int, int, float] | None = None
    """First and last of some steps, and the seconds that they took; None if no event tells."""

    @property
    def last_step(self) -> int:
        """Number of the last step."""
        return self.after_step + self.num_steps


@dataclass(slots=True)
class Job:
    """A job, from its event "open" on."""

    fields: Mapping[str, Any]
    """The event "open"; empty for events before the first one."""
    marks: list[Mark] = field(default_factory=list)
    """All events, in their order."""
    segments: list[Segment] = field(default_factory=list)

    @property
    def opened(self) -> float | None:
        """Time of the event "open"."""
        return next((mark.time for mark in self.marks if mark.kind == OPEN), None)

    @property
    def began(self) -> float | None:
        """Time of the first event "begin", at which the first step was recorded."""
        return next((mark.time for mark in self.marks if mark.kind == BEGIN), None)

    @property
    def closed(self) -> float | None:
        """Time of the event "close"; None for a job that was killed, or is at work."""
        return next((mark.time for mark in reversed(self.marks) if mark.kind == CLOSE), None)

    @property
    def last_time(self) -> float | None:
        """Latest time of an event."""
        return max((mark.time for mark in self.marks if mark.time is not None), default=None)

    @property
    def startup_seconds(self) -> float | None:
        """Seconds from the event "open" until the first step was recorded."""
        return None if self.opened is None or self.began is None else self.began - self.opened

    @property
    def known_seconds(self) -> float | None:
        """Seconds from the event "open" to the last event."""
        return None if self.opened is None or self.last_time is None else self.last_time - self.opened

    @property
    def num_steps(self) -> int:
        """Number of steps that the job recorded."""
        return sum(segment.num_steps for segment in self.segments)

    @property
    def num_superseded(self) -> int:
        """Number of these steps that were trained again."""
        return sum(segment.num_superseded for segment in self.segments)


def jobs_of(events: Sequence[Mapping[str, Any]], lines_before: Sequence[int], num_lines: int) -> list[Job]:
    """Returns the jobs of a run.

    Args:
        events: all events.
        lines_before: for each event "begin", the number of lines of steps before it.
        num_lines: number of all lines of steps.

    >>> events = [
    ...     {"event": "open", "time": 5.0}, {"event": "begin", "time": 7.0, "after_step": 0},
    ...     {"event": "open", "time": 20.0}, {"event": "begin", "time": 21.0, "after_step": 3},
    ... ]
    >>> first, second = jobs_of(events, [0, 5], 9)
    >>> first.startup_seconds, first.num_steps, first.num_superseded, second.segments[0].last_step
    (2.0, 5, 2, 7)
    """
    jobs: list[Job] = []
    segments = iter(_segments(events, lines_before, num_lines))
    for event in events:
        kind = event.get("event")
        if kind == OPEN or not jobs:
            jobs.append(Job(event if kind == OPEN else {}))
        jobs[-1].marks.append(Mark(str(kind), _time(event), as_whole(event.get("step"))))
        if kind == BEGIN and (segment := next(segments)).num_steps:
            jobs[-1].segments.append(segment)
    return jobs


def _segments(events: Sequence[Mapping[str, Any]], lines_before: Sequence[int], num_lines: int) -> list[Segment]:
    """Returns the segment of each event "begin"; those without a step have superseded none either."""
    places = [place for place, event in enumerate(events) if event.get("event") == BEGIN]
    ends = [*lines_before, num_lines][1:]
    found: list[Segment] = []
    kept = math.inf  # last step that no later job has trained again
    stop = len(events)
    for place, start, end in reversed(list(zip(places, lines_before, ends, strict=True))):
        event = events[place]
        after, count = min(max(int(event["after_step"]), 0), _MOST_STEPS), max(0, min(end, num_lines) - start)
        superseded = 0
        if count:
            superseded = min(count, max(0, after + count - int(min(kept, after + count))))
            kept = min(kept, after)
        of_job = itertools.takewhile(lambda one: one.get("event") != OPEN, events[place + 1 : stop])
        pace = _pace(event, list(of_job), after + count - superseded)
        found.append(Segment(after, count, superseded, _time(event), pace))
        stop = place
    return found[::-1]


def _pace(
    begin: Mapping[str, Any], others: Sequence[Mapping[str, Any]], last_kept: int
) -> tuple[int, int, float] | None:
    """Returns the steps between a begin event and the last event whose step is known, and their seconds.

    The event "begin" is written when its first step is recorded, so the seconds are those of the steps after it.
    """
    start, first = _time(begin), int(begin["after_step"]) + 2
    for event in reversed(others):
        step, time = as_whole(event.get("step")), _time(event)
        if step is None or time is None or start is None:
            continue
        if first <= step <= last_kept and time > start:
            return first, step, time - start
    return None


def _time(event: Mapping[str, Any]) -> float | None:
    time = as_number(event.get("time"))
    return time if 0 <= time < 1e11 else None  # year 5138
