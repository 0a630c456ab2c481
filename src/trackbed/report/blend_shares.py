"""Shares of the datasets by stage: those that the blend wants, and those that the steps have consumed.

A row is a `[[dataset]]` of the blend file, with all datasets of its glob. Where the file is missing, or does not fit
the datasets, each dataset is a row.

Shapes: N lines, R rows, P pieces, B bins.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.blends.blend_file import BlendFile, DatasetEntry
from trackbed.index.splits import Split
from trackbed.report.columns import Floats, Integers, as_number, as_whole, floats

_NO_END: Final = 2**62
_EXACT: Final = 2**53
"""Positions and numbers of tokens must be below this one, so that a float is exact."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Names of the rows, and the row of each dataset by its number."""

    names: tuple[str, ...]
    of_dataset: tuple[int, ...]
    are_entries: bool
    """True if a row is a `[[dataset]]` of the blend file."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Samples with one set of shares, or a ramp from one set to another."""

    first_sample: int
    stop_sample: int
    before: Floats
    """`[R]` shares at the first sample."""
    after: Floats
    """`[R]` shares `length` samples later."""
    length: int
    """Samples within which the shares change; 0 for constant shares."""

    def shares_at(self, sample: int) -> Floats:
        """Returns the `[R]` shares at a sample."""
        if not self.length:
            return self.before
        return self.before + (self.after - self.before) * min(1.0, (sample - self.first_sample) / self.length)

    @property
    def key(self) -> tuple[Any, ...]:
        """Value that is equal for one stage in two jobs, also if the second job ends it elsewhere."""
        return self.first_sample, self.length, self.before.round(9).tobytes(), self.after.round(9).tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class StageShares:
    """Shares that a stage wanted, and tokens that the steps that began in it have consumed."""

    first_sample: int | None
    """First sample of the stage; None if the shares wanted are not known."""
    is_ramp: bool
    first_step: int
    last_step: int
    samples: int
    wanted: Floats | None
    """`[R]` shares of the samples of these steps, integrated over a ramp."""
    tokens: Integers
    """`[R]` tokens consumed."""

    @property
    def consumed(self) -> Floats:
        """`[R]` shares of the tokens consumed."""
        return shares(self.tokens.astype(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Contents of the batches: one item for each dataset in each line."""

    line: Integers
    dataset: Integers
    tokens: Integers
    loss: Floats
    """Mean loss of the samples; NaN where it is not known."""


def shares(weights: Floats) -> Floats:
    """Returns weights divided by their sum; zeros if there is none."""
    total = weights.sum(axis=-1, keepdims=True)
    found: Floats = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return found


def batches_of(lines: Sequence[Mapping[str, Any]]) -> Batches:
    """Returns the contents of the batches of lines, without items that are damaged.

    >>> found = batches_of([{"datasets": {"0": [512, 2.5]}}, {"datasets": {"1": [256, None], "x": 3}}])
    >>> found.line.tolist(), found.dataset.tolist(), found.tokens.tolist(), found.loss.tolist()
    ([0, 1], [0, 1], [512, 256], [2.5, nan])
    """
    line_of: list[int] = []
    names: list[str] = []
    contents: list[list[Any]] = []
    for place, line in enumerate(lines):
        items = line.get("datasets")
        for name, item in items.items() if isinstance(items, dict) else ():
            if isinstance(item, list) and len(item) == 2:
                line_of.append(place)
                names.append(name)
                contents.append(item)
    numbers = {name: int(name) if re.fullmatch("[0-9]{1,6}", name) else -1 for name in set(names)}
    dataset = np.array([numbers[name] for name in names], dtype=np.int64)
    tokens = floats([item[0] for item in contents])
    kept = (dataset >= 0) & (tokens >= 0) & (tokens < _EXACT)
    return Batches(
        line=np.array(line_of, dtype=np.int64)[kept],
        dataset=dataset[kept],
        tokens=tokens[kept].astype(np.int64),
        loss=floats([item[1] for item in contents])[kept],
    )


def rows_of(prefixes: Sequence[str], file: BlendFile | None, num_datasets: int) -> Rows:
    """Returns the rows of the datasets.

    Args:
        prefixes: prefixes of the datasets, by number, as the last job had them.
        file: the blend file of that job; None if it cannot be read.
        num_datasets: number of datasets that lines name; those without a prefix are rows of their own.
    """
    entries = [] if file is None else train_entries(file)
    counts = _members(entries, prefixes)
    if counts is None:
        names = [PurePath(prefix).name or prefix for prefix in prefixes]
        times = Counter(names)
        names = [name if times[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)]
        of_dataset = list(range(len(prefixes)))
    else:
        names = [entry.name for entry in entries]
        of_dataset = [row for row, count in enumerate(counts) for _ in range(count)]
    for number in range(len(prefixes), num_datasets):
        of_dataset.append(len(names))
        names.append(f"dataset {number}")
    return Rows(tuple(names), tuple(of_dataset), counts is not None)


def train_entries(file: BlendFile) -> list[DatasetEntry]:
    """Returns the `[[dataset]]` tables of a file whose datasets are in training."""
    return [entry for entry in file.datasets if entry.splits is None or Split.train in entry.splits]


def _members(entries: Sequence[DatasetEntry], prefixes: Sequence[str]) -> list[int] | None:
    """Returns the number of datasets of each entry; None if the entries do not fit the prefixes."""
    globs = [entry for entry in entries if entry.kind == "glob"]
    rest = len(prefixes) - (len(entries) - len(globs))
    if not entries or rest < len(globs) or (rest and not globs):
        return None
    if len(globs) <= 1:
        return [rest if entry.kind == "glob" else 1 for entry in entries]
    counts, place = [], 0
    for entry in entries:
        start = place
        place += entry.kind != "glob"
        while entry.kind == "glob" and place < len(prefixes) and _matches(prefixes[place], entry):
            place += 1
        counts.append(place - start)
    return counts if place == len(prefixes) else None


def _matches(prefix: str, entry: DatasetEntry) -> bool:
    return any(fnmatchcase(PurePath(prefix).name, PurePath(pattern).name) for pattern in entry.patterns)


def pieces_of(job: Mapping[str, Any], file: BlendFile | None, rows: Rows) -> list[Piece]:
    """Returns the pieces of the blend of a job; none if the record does not tell the shares.

    Args:
        job: what the job has said of itself: the keys of the events "open", "blend" and "begin".
        file: its blend file.
        rows: the rows.
    """
    given = job.get("stages")
    stages = _recorded_stages(given, rows) if given is not None else _stages_of_file(file, rows)
    return [] if stages is None else laid_out(stages)


def _recorded_stages(given: Any, rows: Rows) -> list[tuple[int, Floats, int]] | None:
    """Returns the stages of an event "blend": first sample, `[R]` weights, and samples of the ramp."""
    found = []
    for stage in given if isinstance(given, list) else [None]:
        if not isinstance(stage, list) or len(stage) not in (2, 3) or not isinstance(stage[1], list):
            return None
        first, ramp = as_whole(stage[0]), as_whole(stage[2]) if len(stage) == 3 else 0
        weights = np.array([as_number(weight) for weight in stage[1]], dtype=np.float64)
        if (
            first is None
            or ramp is None
            or ramp < 0
            or len(weights) > len(rows.of_dataset)
            or not _are_weights(weights)
        ):
            return None
        by_row = np.bincount(rows.of_dataset[: len(weights)], weights=weights, minlength=len(rows.names))
        found.append((first, by_row.astype(np.float64), ramp))
    firsts = [first for first, _, _ in found]
    return found if firsts and firsts == sorted(firsts) and firsts[0] >= 0 and firsts[-1] < _EXACT else None


def _stages_of_file(file: BlendFile | None, rows: Rows) -> list[tuple[int, Floats, int]] | None:
    """Returns the stages of a blend file; None if shares follow from sizes of data, or rows are those of another."""
    if file is None or not rows.are_entries:
        return None
    places = {name: place for place, name in enumerate(rows.names)}
    entries = train_entries(file)
    if any(entry.name not in places for entry in entries):
        return None

    def by_row(weights: Mapping[str, float]) -> Floats:
        found = np.zeros(len(rows.names), dtype=np.float64)
        for name, weight in weights.items():
            found[places[name]] = weight
        return found

    if len(entries) == 1:
        base = by_row({entries[0].name: 1.0})
    elif any(entry.measure != "weight" for entry in entries):
        return None
    else:
        base = by_row({entry.name: entry.amount for entry in entries})
    further = [(stage.first_sample, by_row(dict(stage.weights)), stage.ramp) for stage in file.stages]
    found = [(0, base, 0), *further]
    return found if all(_are_weights(weights) for _, weights, _ in found) else None


def _are_weights(weights: Floats) -> bool:
    return bool(len(weights)) and bool((weights >= 0).all()) and 0 < weights.sum() < math.inf


def laid_out(stages: Sequence[tuple[int, Floats, int]]) -> list[Piece]:
    """Returns the pieces of stages; a ramp and the samples after it are two pieces.

    >>> a, b = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    >>> [(one.first_sample, one.stop_sample, one.length) for one in laid_out([(0, a, 0), (40, b, 20), (90, a, 0)])]
    [(0, 40, 0), (40, 60, 20), (60, 90, 0), (90, 4611686018427387904, 0)]
    """
    found: list[Piece] = []
    current: Piece | None = None
    stops = [*(first for first, _, _ in stages[1:]), _NO_END]
    for (first, weights, ramp), stop in zip(stages, stops, strict=True):
        target = shares(weights)
        if ramp and current is not None:
            end = min(stop, first + ramp)
            current = Piece(first, end, current.shares_at(first), target, ramp)
            found.append(current)
            if end < stop:
                found.append(Piece(end, stop, target, target, 0))
                current = found[-1]
        else:
            current = Piece(first, stop, target, target, 0)
            found.append(current)
    return [piece for piece in found if piece.stop_sample > piece.first_sample]


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Samples that each piece has given to each key, such as a bin or a stage, so that shares can be integrated."""

    pieces: Sequence[Piece]
    key: npt.NDArray[np.int64]
    piece: npt.NDArray[np.int64]
    samples: Floats
    middle: Floats
    """Mean position of the samples."""

    def by(self, key_of_line: Integers, num_keys: int, num_rows: int) -> Floats:
        """Returns the `[keys, R]` samples that each row should have had, by keys of the lines."""
        if not self.pieces:
            return np.zeros((num_keys, num_rows), dtype=np.float64)
        before, after = (np.stack([getattr(one, name) for one in self.pieces]) for name in ("before", "after"))
        firsts = np.array([one.first_sample for one in self.pieces], dtype=np.float64)
        lengths = np.array([max(one.length, 1) for one in self.pieces], dtype=np.float64)
        place = key_of_line[self.key] * len(self.pieces) + self.piece
        size = num_keys * len(self.pieces)
        # A share is linear in the position, so the mean over a range is the share in its middle.
        done = (self.middle - firsts[self.piece]) / lengths[self.piece]
        counts = np.bincount(place, self.samples, size).reshape(num_keys, len(self.pieces))
        moments = np.bincount(place, self.samples * done, size).reshape(num_keys, len(self.pieces))
        found: Floats = counts @ before + moments @ (after - before)
        return found


def wanted_of(first_samples: Floats, num_samples: Floats, group: Integers, groups: Sequence[Sequence[Piece]]) -> Wanted:
    """Divides the samples of lines among the pieces of their jobs.

    Args:
        first_samples: `[N]` position of the first sample of each line; NaN where it is not known.
        num_samples: `[N]` number of samples.
        group: `[N]` number of the job's blend, in `[0, len(groups))`.
        groups: pieces of each blend.
    """
    pieces = [piece for one in groups for piece in one]
    found: list[tuple[Integers, Integers, Floats, Floats]] = []
    offset = 0
    for number, own in enumerate(groups):
        are_known = (first_samples >= 0) & (first_samples < _EXACT) & (num_samples > 0) & (num_samples < _EXACT)
        lines = np.flatnonzero(are_known & (group == number))
        start, stop = first_samples[lines], first_samples[lines] + num_samples[lines]
        firsts = np.array([piece.first_sample for piece in own], dtype=np.float64)
        stops = np.array([piece.stop_sample for piece in own], dtype=np.float64)
        while len(lines) and len(own):  # a line that lies in several pieces is divided
            place = np.maximum(np.searchsorted(firsts, start, side="right") - 1, 0)
            end = np.minimum(stop, stops[place])
            found.append((lines, place + offset, end - start, (start + end) / 2))
            rest = end < stop
            lines, start, stop = lines[rest], end[rest], stop[rest]
        offset += len(own)
    if not found:
        empty, none = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float64)
        return Wanted(pieces, empty, empty, none, none)
    key, place, samples, middle = (np.concatenate(one) for one in zip(*found, strict=True))
    return Wanted(pieces, key, place, samples, middle)


def stages_of(
    wanted: Wanted, batches: Batches, rows: Rows, steps: Integers, num_samples: Floats
) -> tuple[list[StageShares], Integers]:
    """Returns the shares by stage, in the order of their first steps, and the `[N]` stage of each line.

    A line belongs to the stage of its first sample. Lines without known shares form a stage of their own.
    """
    numbers: dict[Any, int] = {}
    stage_of_piece = np.array([numbers.setdefault(one.key, len(numbers)) for one in wanted.pieces], dtype=np.int64)
    stage_of_line = np.full(len(steps), len(numbers), dtype=np.int64)
    # The first part of a line comes first, so it is assigned last.
    stage_of_line[wanted.key[::-1]] = stage_of_piece[wanted.piece[::-1]]
    num_stages, num_rows = len(numbers) + 1, len(rows.names)
    amounts = shares(wanted.by(stage_of_line, num_stages, num_rows))
    row = np.array(rows.of_dataset, dtype=np.int64)[batches.dataset]
    place = stage_of_line[batches.line] * num_rows + row
    tokens = np.bincount(place, batches.tokens, num_stages * num_rows).astype(np.int64).reshape(num_stages, num_rows)
    samples = np.bincount(stage_of_line, np.nan_to_num(num_samples), num_stages)
    found = []
    for stage in np.unique(stage_of_line).tolist():
        lines = np.flatnonzero(stage_of_line == stage)
        is_known = stage < len(numbers)
        piece = wanted.pieces[int(np.flatnonzero(stage_of_piece == stage)[0])] if is_known else None
        found.append(
            StageShares(
                first_sample=None if piece is None else piece.first_sample,
                is_ramp=piece is not None and piece.length > 0,
                first_step=int(steps[lines].min()),
                last_step=int(steps[lines].max()),
                samples=int(samples[stage]),
                wanted=None if piece is None else amounts[stage],
                tokens=tokens[stage],
            )
        )
    return sorted(found, key=lambda one: one.first_step), stage_of_line
