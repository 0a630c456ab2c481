"""Documents of one key of a chunk: their tokens, and the accumulator of them.

Shapes: D documents of one key, N sequences of them (one each, one for each sentence, or text and image), T tokens of
all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.preprocess.chat.trained_column import TrainedColumn, TrainedRuns

Counts = npt.NDArray[np.int64]
Ids = npt.NDArray[Any]

_LONG_TOKENS: Final = 128  # mean length above which documents are copied one by one


class Documents(NamedTuple):
    """Documents of one key."""

    tokens: npt.NDArray[Any]
    """`[T]` tokens of all sequences."""
    lengths: Counts
    """`[N]` tokens in each sequence."""
    counts: Counts
    """`[D]` sequences in each document."""


def without_tokens(documents: Documents) -> npt.NDArray[np.bool_]:
    """Returns `[D]` flags: True for a document without tokens.

    >>> without_tokens(Documents(np.arange(3), np.array([1, 0, 0, 2]), np.array([2, 0, 1, 1])))
    array([False,  True,  True, False])
    """
    tokens_before = _sums(documents.lengths)
    is_empty: npt.NDArray[np.bool_] = np.diff(tokens_before[_sums(documents.counts)]) == 0
    return is_empty


def leave_out(keys: Sequence[Documents], records: npt.NDArray[np.bool_]) -> list[Documents]:
    """Returns the documents of each key, without the documents of the records that are marked.

    Args:
        keys: documents of each key, D each.
        records: `[D]` True for a record to leave out.
    """
    found = []
    for tokens, lengths, counts in keys:
        is_kept_sequence = np.repeat(~records, counts)
        is_kept_token = np.repeat(is_kept_sequence, lengths)
        found.append(Documents(tokens[is_kept_token], lengths[is_kept_sequence], counts[~records]))
    return found


def fill_empty(lengths: Counts, counts: Counts) -> tuple[Counts, Counts]:
    """Returns lengths and counts in which each document without sequences has one of length 0.

    >>> fill_empty(np.array([4, 5]), np.array([0, 2, 0]))
    (array([0, 4, 5, 0]), array([1, 2, 1]))
    """
    is_empty = counts == 0
    places = np.cumsum(counts, dtype=np.int64)[is_empty]
    return np.insert(lengths, places, 0), np.where(is_empty, 1, counts)


def _sums(numbers: Counts) -> Counts:
    return np.concatenate([[0], np.cumsum(numbers, dtype=np.int64)])


@dataclass(frozen=True, slots=True)
class KeyTokens:
    """Documents of one key."""

    tokens: npt.NDArray[Any]
    """`[T]` in the dtype of the file."""
    lengths: npt.NDArray[np.int64]
    """`[N]` tokens in each sequence, at least 1 unless documents have images or there are several keys."""
    counts: npt.NDArray[np.int64]
    """`[D]` sequences in each document, at least 1."""
    dropped: int
    """Number of texts that become no document: texts without tokens, or all texts of records that are left out."""
    unknown: int | None = None
    """Number of unknown tokens; None if the tokenizer has none."""
    empty: int = 0
    """Number of texts without tokens that become a sequence without text."""
    segments: npt.NDArray[np.int64] | None = None
    """`[D]` number of each document's segment in the chunk; None if sources are not kept."""
    places: npt.NDArray[np.int64] | None = None
    """`[D]` place of each document's record, see `TextRecord`; None if sources are not kept."""
    trained: TrainedRuns | None = None
    """Trained tokens of the documents; None if records are texts."""


@dataclass(slots=True)
class Column:
    """Accumulator for the documents of one key; with `keeps_empty`, one without tokens has a sequence without text."""

    dtype: np.dtype[Any]
    unknown_id: int | None
    keeps_empty: bool = False
    keeps_sources: bool = False
    segment: int = 0
    """Number of the segment of the documents that follow."""
    segments: list[Counts] = field(default_factory=list)
    places: list[Counts] = field(default_factory=list)
    parts: list[Ids] = field(default_factory=list)
    lengths: list[Counts] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    trained: TrainedColumn | None = None
    """Trained tokens of the documents; None if records are texts."""
    dropped: int = 0
    unknown: int = 0
    empty: int = 0

    def add(self, tokens: Ids, lengths: Counts, counts: Counts, eod: int | None, places: Counts) -> None:
        """Appends documents, each followed by `eod`, without sequences that have no tokens."""
        if self.unknown_id is not None:
            self.unknown += int(np.count_nonzero(tokens == self.unknown_id))
        is_kept = lengths > 0
        if not is_kept.all() or not counts.all():
            kept_before = np.concatenate([[0], np.cumsum(is_kept, dtype=np.int64)])
            counts = np.diff(kept_before[np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])])
            num_empty, lengths = int((counts == 0).sum()), lengths[is_kept]
            if self.keeps_empty:
                self.empty += num_empty
                lengths, counts = fill_empty(lengths, counts)
            else:
                self.dropped += num_empty
                counts, places = counts[counts > 0], places[counts > 0]
        if eod is not None:
            last = np.cumsum(counts, dtype=np.int64) - 1
            tokens = _with_ends(tokens, np.cumsum(lengths, dtype=np.int64)[last], eod)
            lengths = lengths.copy()
            lengths[last] += 1
        self.parts.append(tokens)
        self.lengths.append(lengths)
        self.counts.append(counts)
        self._add_sources(places)

    def _add_sources(self, places: Counts) -> None:
        if self.keeps_sources:
            self.places.append(places)
            self.segments.append(np.full(len(places), self.segment, dtype=np.int64))

    def add_pair(self, text: Ids, image: Ids, place: int) -> None:
        """Appends a document of two sequences, either of which may be empty."""
        self._add_sources(np.array([place], dtype=np.int64))
        self.parts += [text, image]
        self.lengths.append(np.array([len(text), len(image)], dtype=np.int64))
        self.counts.append(np.array([2], dtype=np.int64))

    def to_key_tokens(self) -> KeyTokens:
        """Returns everything that was appended."""
        tokens = np.concatenate([np.empty(0, dtype=self.dtype), *self.parts])
        nothing = np.empty(0, dtype=np.int64)
        lengths, counts = (np.concatenate([nothing, *numbers]) for numbers in (self.lengths, self.counts))
        unknown = None if self.unknown_id is None else self.unknown
        segments, places = (
            np.concatenate([nothing, *found]) if self.keeps_sources else None for found in (self.segments, self.places)
        )
        trained = None if self.trained is None else self.trained.to_runs()
        return KeyTokens(tokens, lengths, counts, self.dropped, unknown, self.empty, segments, places, trained)


def _with_ends(tokens: Ids, ends: Counts, eod: int) -> Ids:
    """Returns the `[T + D]` tokens of concatenated documents, each followed by `eod`; `[D]` `ends` are ascending."""
    if len(tokens) < _LONG_TOKENS * len(ends):
        return np.insert(tokens, ends, eod)
    found = np.empty(len(tokens) + len(ends), dtype=tokens.dtype)
    start = 0
    for number, stop in enumerate(ends.tolist()):
        found[start + number : stop + number] = tokens[start:stop]
        start = stop
    found[ends + np.arange(len(ends))] = eod
    return found
