"""Observers of communication, and the record of how much of it was hidden behind computation."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import orjson

from trackbed.files import new_partial, publish, write_new
from trackbed.grads.collectives import Label, Work


class BucketObserver(Protocol):
    """Receives the events of the bucket groups of one rank, on the thread that trains."""

    def ready(self, label: Label) -> None:
        """All gradients of a group have arrived."""
        ...

    def issued(self, label: Label, kind: str, num_bytes: int, num_ranks: int, work: Work) -> None:
        """An operation of a group has been issued.

        Args:
            label: step and number of the group.
            kind: "all-reduce", "reduce-scatter" or "all-gather".
            num_bytes: bytes of the group's buffers.
            num_ranks: number of ranks.
            work: operation.
        """
        ...

    def waited(self, start: float, stop: float) -> None:
        """The rank has waited for an operation, from `start` to `stop` in seconds of `time.perf_counter`."""
        ...


_FACTORS: Final = {"all-reduce": 2, "reduce-scatter": 1, "all-gather": 1}
"""Times that (n - 1) / n of a bucket's bytes are moved per rank, of n ranks."""


@dataclass(frozen=True, slots=True)
class BucketEvent:
    """Communication of one bucket group. Times are seconds of `time.perf_counter`."""

    step: int
    """Number of the training step."""
    bucket: int
    """Number of the bucket group, in the order in which the groups are reduced."""
    kind: str
    """"all-reduce", "reduce-scatter" or "all-gather"."""
    ready: float
    """Time when the last gradient arrived; that of `issued` if the group did not wait for gradients."""
    issued: float
    """Time when the operation was issued."""
    done: float
    """Time when it was over; infinite while it is running."""
    bytes: int
    """Bytes moved per rank: of n ranks, 2 (n - 1) / n of the bucket for an all-reduce, (n - 1) / n for others."""


class Timeline:
    """Observer of `DistributedDataParallel` that records events.

    >>> timeline = Timeline()
    >>> timeline.hidden_share
    1.0
    """

    def __init__(self) -> None:
        self.events: list[BucketEvent] = []
        """Events in the order in which the operations were issued."""
        self._ready: dict[Label, float] = {}
        self._waits: list[tuple[float, float]] = []

    def ready(self, label: Label) -> None:
        """Records that all gradients of a bucket group have arrived."""
        self._ready[label] = time.perf_counter()

    def issued(self, label: Label, kind: str, num_bytes: int, num_ranks: int, work: Work) -> None:
        """Records that an operation was issued, and when it is over."""
        now = time.perf_counter()
        ready = now if kind == "all-gather" else self._ready.pop(label, now)
        moved = _FACTORS[kind] * num_bytes * (num_ranks - 1) // num_ranks
        place = len(self.events)
        self.events.append(BucketEvent(label.step, label.bucket, kind, ready, now, float("inf"), moved))

        def finish() -> None:
            self.events[place] = replace(self.events[place], done=time.perf_counter())

        work.on_done(finish)

    def waited(self, start: float, stop: float) -> None:
        """Records that the rank has waited for communication."""
        self._waits.append((start, stop))

    @property
    def hidden_share(self) -> float:
        """Share of the time of communication, in [0, 1], in which the rank did not wait for it; 1 if there was none."""
        return hidden_share([(event.issued, event.done) for event in self.events], self._waits)

    def summary(self) -> str:
        """Table of the steps: operations, bytes moved per rank, time of communication, time waited, share hidden."""
        lines = [f"{'step':>8}{'operations':>12}{'MB per rank':>13}{'ms':>10}{'ms waited':>11}{'hidden':>8}"]
        for step in sorted({event.step for event in self.events}):
            events = [event for event in self.events if event.step == step]
            spans = [(event.issued, event.done) for event in events]
            busy, waited = _length(_union(spans)), _length(_common(_union(spans), _union(self._waits)))
            share = hidden_share(spans, self._waits)
            megabytes = sum(event.bytes for event in events) / 1e6
            times = f"{1e3 * busy:>10.1f}{1e3 * waited:>11.1f}"
            lines.append(f"{step:>8}{len(events):>12}{megabytes:>13.1f}{times}{share:>8.0%}")
        return "\n".join(lines)

    def write(self, path: Path | str) -> None:
        """Writes a trace in Chrome's format, which chrome://tracing and Perfetto show.

        Args:
            path: file to write, replaced if it exists.
        """
        start = min((event.ready for event in self.events), default=0.0)
        traced = [
            {
                "name": f"bucket {event.bucket}",
                "cat": name,
                "ph": "X",
                "ts": 1e6 * (begin - start),
                "dur": 1e6 * (end - begin),
                "pid": 0,
                "tid": name,
                "args": {"step": event.step, "bytes": event.bytes},
            }
            for event in self.events
            if event.done < float("inf")
            for name, begin, end in (("ready", event.ready, event.issued), (event.kind, event.issued, event.done))
        ]
        traced += [
            {
                "name": "wait",
                "ph": "X",
                "ts": 1e6 * (begin - start),
                "dur": 1e6 * (end - begin),
                "pid": 0,
                "tid": "wait",
            }
            for begin, end in self._waits
        ]
        partial = new_partial(Path(path))
        write_new(partial, orjson.dumps({"traceEvents": traced, "displayTimeUnit": "ms"}))
        publish(partial, path)


def hidden_share(operations: Sequence[tuple[float, float]], waits: Sequence[tuple[float, float]]) -> float:
    """Share of the time of some operations that lies in no wait. Pure.

    Args:
        operations: start and stop of each operation; they may overlap.
        waits: start and stop of each wait.

    >>> hidden_share([(0.0, 4.0), (2.0, 8.0)], [(6.0, 9.0)])
    0.75
    """
    busy = _union(operations)
    total = _length(busy)
    return 1.0 if total == 0 else 1.0 - _length(_common(busy, _union(waits))) / total


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(span for span in spans if span[1] < float("inf")):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def _common(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intersection of two lists of disjoint spans in ascending order."""
    common = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            common.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(stop - start for start, stop in spans)
