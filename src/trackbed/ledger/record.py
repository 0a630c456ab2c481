"""Record of a run as its files have it: the steps that count, and events (docs/formats/run.md)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from trackbed.errors import ArgumentError, FormatError
from trackbed.ledger.lines import read_lines

STEPS: Final = "steps.jsonl"
EVENTS: Final = "events.jsonl"
BLENDS: Final = "blends"
OPEN: Final = "open"
"""Event of a job that has opened the run."""
BLEND: Final = "blend"
"""Event of a job that has gone over to another blend, or to other stages."""
BEGIN: Final = "begin"
"""Event before the first step of a job."""


LINE_KEYS: Final = frozenset(
    (
        *("step", "first_sample", "num_samples", "num_ranks", "loss", "datasets", "grad_norm", "batch_hash"),
        *("stall_seconds", "checkpoint_seconds", "communication_seconds"),
    )
)
"""Keys of a step that a program does not choose."""
_OWN_EVENTS: Final = (OPEN, BEGIN, BLEND, "refused", "close")
_EVENT_KEYS: Final = ("event", "time", "step")


def check_event(kind: str, fields: dict[str, Any]) -> None:
    """Raises an ArgumentError for an event of a program that the record could not have."""
    if not isinstance(kind, str) or not kind or kind in _OWN_EVENTS:
        raise ArgumentError(f"kind must be a name other than {', '.join(_OWN_EVENTS)}, found {kind!r}")
    taken = [name for name in _EVENT_KEYS if name in fields]
    if taken:
        raise ArgumentError(f"event {kind!r}: fields must have names of their own, found {', '.join(taken)}")
    try:
        orjson.dumps(fields, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"event {kind!r}: fields must be values that JSON has, found: {error}") from None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The record of a run."""

    steps: list[dict[str, Any]]
    """Lines of the steps that count, in the order of their numbers."""
    superseded: list[dict[str, Any]]
    """Lines of steps that were trained again, from a checkpoint before them."""
    events: list[dict[str, Any]]
    """All events, in their order."""
    jobs: list[dict[str, Any]]
    """For each line in `steps`, what its job has said of itself: the keys of the events "open" and "begin"."""

    def find(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the line of a step, and what its job has said of itself.

        Raises:
            ArgumentError: the step is not recorded.
        """
        for line, job in zip(self.steps, self.jobs, strict=True):
            if line["step"] == step:
                return line, job
        known = f"steps {self.steps[0]['step']} to {self.steps[-1]['step']}" if self.steps else "no steps"
        raise ArgumentError(f"step must be one that is recorded, found {step} and {known}")


def read_run(folder: str | Path) -> RunRecord:
    """Reads the record of a run, also while a job adds to it.

    Raises:
        FormatError: there is none in the folder, or it is damaged.
        OSError: it cannot be read.
    """
    folder = Path(folder)
    if not (folder / EVENTS).exists():
        raise FormatError(f"{folder}: must be the folder of a run, with {EVENTS}, found none")
    steps = read_lines(folder / STEPS)
    events = [fields for _, fields in read_lines(folder / EVENTS)]
    try:
        begins = [(int(one["steps_bytes"]), int(one["after_step"])) for one in events if one.get("event") == BEGIN]
        counts = which_count([(start, int(fields["step"])) for start, fields in steps], begins)
        jobs = jobs_of([start for start, _ in steps], events)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{folder}: a line must have the fields of its kind, found: {error!r}") from None
    found = list(zip([fields for _, fields in steps], jobs, counts, strict=True))
    kept = [(fields, job) for fields, job, does_count in found if does_count]
    others = [fields for fields, _, does_count in found if not does_count]
    return RunRecord([fields for fields, _ in kept], others, events, [job for _, job in kept])


def jobs_of(starts: Sequence[int], events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each line what its job has said of itself.

    Args:
        starts: first byte of each line, in rising order.
        events: all events.

    >>> events = [{"event": "open", "host": "a"}, {"event": "begin", "steps_bytes": 0, "after_step": 0}]
    >>> jobs_of([0, 10], events)[1]
    {'host': 'a', 'steps_bytes': 0, 'after_step': 0}
    """
    opened: dict[str, Any] = {}
    begins: list[dict[str, Any]] = []
    for event in events:
        fields = {name: value for name, value in event.items() if name not in ("event", "time")}
        if event.get("event") == OPEN:
            opened = fields
        elif event.get("event") == BLEND:
            opened = {**opened, **fields}
        elif event.get("event") == BEGIN:
            begins.append({**opened, **fields})
    sizes = [begin["steps_bytes"] for begin in begins]
    return [begins[found - 1] if (found := bisect_right(sizes, start)) else {} for start in starts]


def which_count(steps: Sequence[tuple[int, int]], begins: Sequence[tuple[int, int]]) -> list[bool]:
    """Says of each line whether its step counts: no job that began later has trained that step again.

    Args:
        steps: first byte and step of each line, in their order.
        begins: size of the file when a job began, and the step behind which it began.

    >>> which_count([(0, 1), (50, 2), (100, 3), (150, 2)], [(0, 0), (150, 1)])
    [True, False, False, True]
    """
    # A job without a step has superseded nothing, so it does not matter where it would have begun.
    end = steps[-1][0] if steps else -1
    remaining = sorted({size: after for size, after in begins if size <= end}.items())
    found, lowest = [], None
    for start, step in reversed(steps):
        while remaining and remaining[-1][0] > start:
            after = remaining.pop()[1]
            lowest = after if lowest is None else min(lowest, after)
        found.append(lowest is None or step <= lowest)
    return found[::-1]
