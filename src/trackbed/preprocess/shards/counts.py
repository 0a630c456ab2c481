"""Counts of the records in one shard, which its seal keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from trackbed.errors import FormatError
from trackbed.preprocess.input_segments import InputSegment
from trackbed.preprocess.line_numbers import LineCounter, count_lines_before
from trackbed.preprocess.plan import InputChunk
from trackbed.preprocess.report import BAD_SHOWN
from trackbed.preprocess.tokenise import TokenisedChunk

_MAX_REASON: Final = 500


@dataclass(frozen=True, slots=True)
class BadLine:
    """A record that was skipped."""

    path: str
    line: int
    """Line in its file, from 0; in a file that the shard begins inside of, lines of earlier shards are not counted."""
    is_relative: bool
    """True if the shard begins inside the file."""
    reason: str


@dataclass(slots=True)
class ShardCounts:
    """Running counts over the chunks of a shard, added in order.

    Args:
        segments: parts of the input that the shard consists of.
        num_keys: number of keys.
        skip_bad: False if a bad record is an error.
        has_unknown: True if the tokenizer has an unknown token.
    """

    segments: Sequence[InputSegment]
    num_keys: int
    skip_bad: bool
    has_unknown: bool
    text_bytes: int = 0
    records: int = 0
    blank: int = 0
    bad: int = 0
    first_bad: list[BadLine] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    unknown: list[int | None] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    _counter: LineCounter = field(default_factory=LineCounter)
    _is_inside: bool = False
    """True while the segments are of a file that the shard begins inside of."""

    def __post_init__(self) -> None:
        self.dropped = [0] * self.num_keys
        self.empty = [0] * self.num_keys
        self.unknown = [0 if self.has_unknown else None] * self.num_keys
        self._is_inside = bool(self.segments) and self.segments[0].start > 0

    def add(self, chunk: InputChunk, result: TokenisedChunk) -> None:
        """Adds the counts of the next chunk."""
        self.text_bytes += chunk.text_bytes
        for segment, found in zip(chunk.segments, result.segments, strict=False):
            self._is_inside = self._is_inside and segment.start > 0
            for record in found.bad:
                self._add_bad(segment, self._counter.line_of(segment, record), record.reason)
            self._counter.advance(segment, found.lines)
            self.records += found.records
            self.blank += found.blank
        for key, texts in enumerate(result.keys):
            self.dropped[key] += texts.dropped
            self.empty[key] += texts.empty
            if texts.unknown is not None:
                self.unknown[key] = (self.unknown[key] or 0) + texts.unknown

    def to_json(self, key: int) -> dict[str, Any]:
        """Returns the counts for the seal of the pair of one key."""
        return {
            "text_bytes": self.text_bytes,
            "records": self.records,
            "blank": self.blank,
            "bad": self.bad,
            "dropped": self.dropped[key],
            **({"empty": self.empty[key]} if self.num_keys > 1 else {}),
            "unknown": self.unknown[key],
            "lines": self._counter.lines,
            "first_bad": [[one.path, one.line, one.is_relative, one.reason] for one in self.first_bad],
        }

    def _add_bad(self, segment: InputSegment, line: int, reason: str) -> None:
        if not self.skip_bad:
            before = count_lines_before(segment.file, self.segments[0].start) if self._is_inside else 0
            raise FormatError(f"{segment.file.name}:{before + line + 1}: {reason}")
        self.bad += 1
        if len(self.first_bad) < BAD_SHOWN:
            self.first_bad.append(BadLine(segment.file.name, line, self._is_inside, reason[:_MAX_REASON]))
