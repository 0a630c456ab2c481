"""Tokenisation of one chunk of the input, run by a worker.

Shapes: D documents of one key in the chunk, T tokens of all of them.
"""

import contextlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trackbed.datasets.one_core import one_core
from trackbed.kernels import narrow
from trackbed.preprocess.long_text import PART_CHARS, split_text
from trackbed.preprocess.plan import InputChunk
from trackbed.preprocess.readers import BadRecord, Record, read_segment

__all__ = ["BatchTokenizer", "ChunkTokenizer", "FlatTokenizer", "KeyTokens", "TokenisedChunk", "TokenisedSegment"]

_BATCH_CHARS: Final = 1 << 20  # bounds the memory of texts and ids in flight
_LONG_TOKENS: Final = 128  # mean length above which documents are copied one by one

Ids = npt.NDArray[Any]


class BatchTokenizer(Protocol):
    """Interface of a tokenizer for preprocessing. Must be picklable to run in worker processes."""

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, which are in `[0, vocab_size)`."""

    def tokenize_batch(self, texts: Sequence[str]) -> Sequence[Any]:
        """Returns the token ids of each text; raises if one of the texts cannot be tokenised."""


@runtime_checkable
class FlatTokenizer(Protocol):
    """Interface of a tokenizer that returns arrays, and so spends no Python time per token."""

    def tokenize_flat(self, texts: Sequence[str]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Returns the `[T]` concatenated ids of all texts, and the `[D + 1]` offsets of the texts in them."""


@dataclass(frozen=True, slots=True)
class KeyTokens:
    """Documents of one key."""

    tokens: npt.NDArray[Any]
    """`[T]` in the dtype of the file."""
    lengths: npt.NDArray[np.int64]
    """`[D]` tokens in each document, at least 1."""
    dropped: int
    """Number of texts without tokens."""


@dataclass(frozen=True, slots=True)
class TokenisedSegment:
    """Counts and bad records of one segment of the chunk."""

    lines: int
    blank: int
    records: int
    bad: tuple[BadRecord, ...]


@dataclass(frozen=True, slots=True)
class TokenisedChunk:
    """Documents and counts of one chunk."""

    keys: tuple[KeyTokens, ...]
    segments: tuple[TokenisedSegment, ...]
    """In the order of the chunk; ends at the first segment with a bad record unless those are skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTokenizer:
    """Callable that tokenises a chunk; picklable, so that it can be sent to workers."""

    tokenizer: BatchTokenizer
    keys: tuple[str, ...]
    """Keys of the texts in a JSON record."""
    dtype: np.dtype[Any]
    """Dtype of the tokens in the files."""
    eod: int | None
    """Token appended to each document; None for none."""
    skip_bad: bool
    """True to continue after a bad record."""
    max_record_bytes: int
    """Maximum size of one line, one plain text or one cell."""
    part_chars: int = PART_CHARS
    """Maximum length of a text that is tokenised as a whole."""

    def __call__(self, chunk: InputChunk) -> TokenisedChunk:
        """Tokenises a chunk on one core."""
        columns = [_Column(self.dtype) for _ in self.keys]
        segments = []
        with one_core():
            for segment in chunk.segments:
                found = read_segment(segment, keys=self.keys, max_record_bytes=self.max_record_bytes)
                segments.append(self._tokenise(found, columns))
                if segments[-1].bad and not self.skip_bad:
                    break
        return TokenisedChunk(tuple(column.to_key_tokens() for column in columns), tuple(segments))

    def _tokenise(self, found: Iterator[Record | BadRecord | None], columns: "list[_Column]") -> TokenisedSegment:
        lines = blank = records = waiting = 0
        bad: list[BadRecord] = []
        batch: list[Record] = []
        for record in found:
            lines += 1
            if record is None:
                blank += 1
                continue
            records += 1
            if isinstance(record, BadRecord):
                bad.append(record)
            else:
                batch.append(record)
                waiting += sum(map(len, record.texts))
            if waiting >= _BATCH_CHARS:
                bad += self._append(batch, columns)
                batch, waiting = [], 0
            if bad and not self.skip_bad:
                break
        bad += self._append(batch, columns)
        return TokenisedSegment(lines, blank, records, tuple(sorted(bad, key=lambda one: one.line)))

    def _append(self, batch: list[Record], columns: "list[_Column]") -> list[BadRecord]:
        """Appends the documents of a batch to the columns. Returns the records that cannot be tokenised."""
        texts = [[record.texts[number] for record in batch] for number in range(len(columns))]
        if not any(len(text) > self.part_chars for column in texts for text in column):
            # Tokenizers raise any exception, without naming the text, so each text is retried alone below.
            with contextlib.suppress(Exception):
                found = [self._encode(column) for column in texts]
                for column, (tokens, lengths) in zip(columns, found, strict=True):
                    column.add(tokens, lengths, self.eod)
                return []
        return self._append_each(batch, columns)

    def _append_each(self, batch: list[Record], columns: "list[_Column]") -> list[BadRecord]:
        """Does the same as `_append`, text by text."""
        bad = []
        for record in batch:
            outcomes = [self._encode_one(text) for text in record.texts]
            documents = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
            if len(documents) < len(columns):
                why = next(outcome for outcome in outcomes if isinstance(outcome, Exception))
                bad.append(BadRecord(record.line, f"the tokenizer must accept the text, found an error: {why}"))
                continue
            for column, tokens in zip(columns, documents, strict=True):
                column.add(tokens, np.array([len(tokens)], dtype=np.int64), self.eod)
        return bad

    def _encode(self, texts: list[str]) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Returns the concatenated tokens of all texts, and the number of tokens of each."""
        if isinstance(self.tokenizer, FlatTokenizer):
            ids, offsets = self.tokenizer.tokenize_flat(texts)
            return self._as_numbers(ids), np.diff(offsets)
        documents = [self._as_numbers(ids) for ids in self.tokenizer.tokenize_batch(texts)]
        if not documents:
            return np.empty(0, dtype=self.dtype), np.empty(0, dtype=np.int64)
        return np.concatenate(documents), np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))

    def _encode_one(self, text: str) -> Ids | Exception:
        def tokenize(part: str) -> Ids:
            return self._as_numbers(self.tokenizer.tokenize_batch([part])[0])

        try:
            return np.concatenate([tokenize(part) for part in split_text(text, tokenize, part_chars=self.part_chars)])
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  any error makes this a bad record
            return error

    def _as_numbers(self, ids: Any) -> Ids:
        """Converts ids to the dtype of the file; raises if one does not fit."""
        if isinstance(ids, list):
            # The fastest conversion of a list that checks every number; `narrow` below names the one that fails.
            with contextlib.suppress(struct.error):
                return np.frombuffer(struct.pack(f"{len(ids)}{self.dtype.char}", *ids), dtype=self.dtype)
        return np.frombuffer(narrow(np.ascontiguousarray(ids), self.dtype), dtype=self.dtype)


@dataclass(slots=True)
class _Column:
    """Accumulator for the documents of one key."""

    dtype: np.dtype[Any]
    parts: list[Ids] = field(default_factory=list)
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    dropped: int = 0

    def add(self, tokens: Ids, lengths: npt.NDArray[np.int64], eod: int | None) -> None:
        """Appends documents, each followed by `eod`; drops those without tokens."""
        kept = lengths[lengths > 0]
        self.dropped += len(lengths) - len(kept)
        if eod is not None:
            tokens = _with_ends(tokens, kept, eod)
            kept = kept + 1
        self.parts.append(tokens)
        self.lengths.append(kept)

    def to_key_tokens(self) -> KeyTokens:
        tokens = np.concatenate(self.parts) if self.parts else np.empty(0, dtype=self.dtype)
        lengths = np.concatenate(self.lengths) if self.lengths else np.empty(0, dtype=np.int64)
        return KeyTokens(tokens, lengths, self.dropped)


def _with_ends(tokens: Ids, lengths: npt.NDArray[np.int64], eod: int) -> Ids:
    """Returns the `[T + D]` tokens of concatenated documents, each followed by `eod`."""
    ends = np.cumsum(lengths)
    if len(tokens) < _LONG_TOKENS * len(lengths):
        return np.insert(tokens, ends, eod)
    found = np.empty(len(tokens) + len(lengths), dtype=tokens.dtype)
    start = 0
    for number, stop in enumerate(ends.tolist()):
        found[start + number : stop + number] = tokens[start:stop]
        start = stop
    found[ends + np.arange(len(ends))] = eod
    return found
