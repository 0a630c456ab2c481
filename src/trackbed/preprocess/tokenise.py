"""Tokenising one chunk of the input: what a worker does.

Shapes: D documents of one key in the chunk, T tokens of them all.
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
from trackbed.preprocess.plan import Chunk
from trackbed.preprocess.readers import BadRecord, Record, read_piece

__all__ = ["BatchTokenizer", "ChunkTokenizer", "FlatTokenizer", "KeyTokens", "TokenisedChunk", "TokenisedPiece"]

_BATCH_CHARS: Final = 1 << 20  # bounds the memory of texts and ids on their way
_LONG_TOKENS: Final = 128  # in the middle: where documents are longer, they are copied one by one

Ids = npt.NDArray[Any]


class BatchTokenizer(Protocol):
    """What preprocessing needs of a tokenizer. Where it runs in other processes, it must pickle."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def vocab_size(self) -> int:
        """Ids are in `[0, vocab_size)`."""

    def tokenize_batch(self, texts: Sequence[str]) -> Sequence[Any]:
        """Token ids of each text; raises if one of them cannot be tokenised."""


@runtime_checkable
class FlatTokenizer(Protocol):
    """A tokenizer that makes no list of each text's tokens, and so takes no time by token in Python."""

    def tokenize_flat(self, texts: Sequence[str]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """`[T]` ids of all texts, one behind the other, and `[D + 1]` where those of each begin."""


@dataclass(frozen=True, slots=True)
class KeyTokens:
    """The documents of one key."""

    tokens: npt.NDArray[Any]
    """`[T]` in the dtype of the file."""
    lengths: npt.NDArray[np.int64]
    """`[D]` tokens in each document, at least 1."""
    dropped: int
    """Texts that gave no tokens."""


@dataclass(frozen=True, slots=True)
class TokenisedPiece:
    """What was found in one piece of the chunk."""

    lines: int
    blank: int
    records: int
    bad: tuple[BadRecord, ...]


@dataclass(frozen=True, slots=True)
class TokenisedChunk:
    """A chunk's documents."""

    keys: tuple[KeyTokens, ...]
    pieces: tuple[TokenisedPiece, ...]
    """In the order of the chunk's, up to the first one with a bad record where those are not skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTokenizer:
    """The function from a chunk to its tokens, as a value that can be sent to another process."""

    tokenizer: BatchTokenizer
    keys: tuple[str, ...]
    """Keys of the texts in a JSON record."""
    dtype: np.dtype[Any]
    """Type of the tokens in the files."""
    eod: int | None
    """Token that follows each document; None for none."""
    skip_bad: bool
    """Whether to go on behind a bad record."""
    max_record_bytes: int
    """Size that one line, one plain text or one cell may have."""
    part_chars: int = PART_CHARS
    """Texts up to this length are tokenised as a whole."""

    def __call__(self, chunk: Chunk) -> TokenisedChunk:
        """The tokens of a chunk, on one core."""
        columns = [_Column(self.dtype) for _ in self.keys]
        pieces = []
        with one_core():
            for piece in chunk.pieces:
                found = read_piece(piece, keys=self.keys, max_record_bytes=self.max_record_bytes)
                pieces.append(self._tokenise(found, columns))
                if pieces[-1].bad and not self.skip_bad:
                    break
        return TokenisedChunk(tuple(column.done() for column in columns), tuple(pieces))

    def _tokenise(self, found: Iterator[Record | BadRecord | None], columns: "list[_Column]") -> TokenisedPiece:
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
        return TokenisedPiece(lines, blank, records, tuple(sorted(bad, key=lambda one: one.line)))

    def _append(self, batch: list[Record], columns: "list[_Column]") -> list[BadRecord]:
        """Put a batch's documents at the end of the columns. Returns the records that cannot be tokenised."""
        texts = [[record.texts[number] for record in batch] for number in range(len(columns))]
        if not any(len(text) > self.part_chars for column in texts for text in column):
            # Tokenizers raise what they like, and do not say at which text: each is asked alone below.
            with contextlib.suppress(Exception):
                found = [self._encode(column) for column in texts]
                for column, (tokens, lengths) in zip(columns, found, strict=True):
                    column.add(tokens, lengths, self.eod)
                return []
        return self._append_each(batch, columns)

    def _append_each(self, batch: list[Record], columns: "list[_Column]") -> list[BadRecord]:
        """As `_append`, text by text."""
        bad = []
        for record in batch:
            outcomes = [self._encode_one(text) for text in record.texts]
            documents = [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
            if len(documents) < len(columns):
                why = next(outcome for outcome in outcomes if isinstance(outcome, Exception))
                bad.append(BadRecord(record.line, f"a text must suit the tokenizer, which says: {why}"))
                continue
            for column, tokens in zip(columns, documents, strict=True):
                column.add(tokens, np.array([len(tokens)], dtype=np.int64), self.eod)
        return bad

    def _encode(self, texts: list[str]) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Tokens of all texts, one behind the other, and how many each has."""
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
        except Exception as error:  # noqa: BLE001  whatever it is, this record cannot be used
            return error

    def _as_numbers(self, ids: Any) -> Ids:
        """Ids in the dtype of the file, every one of them unchanged."""
        if isinstance(ids, list):
            # The quickest way from a list that looks at every number; what it refuses is named below.
            with contextlib.suppress(struct.error):
                return np.frombuffer(struct.pack(f"{len(ids)}{self.dtype.char}", *ids), dtype=self.dtype)
        return np.frombuffer(narrow(np.ascontiguousarray(ids), self.dtype), dtype=self.dtype)


@dataclass(slots=True)
class _Column:
    """The documents of one key, as they come."""

    dtype: np.dtype[Any]
    parts: list[Ids] = field(default_factory=list)
    lengths: list[npt.NDArray[np.int64]] = field(default_factory=list)
    dropped: int = 0

    def add(self, tokens: Ids, lengths: npt.NDArray[np.int64], eod: int | None) -> None:
        """Take documents, each followed by `eod`; those without tokens are dropped."""
        kept = lengths[lengths > 0]
        self.dropped += len(lengths) - len(kept)
        if eod is not None:
            tokens = _with_ends(tokens, kept, eod)
            kept = kept + 1
        self.parts.append(tokens)
        self.lengths.append(kept)

    def done(self) -> KeyTokens:
        tokens = np.concatenate(self.parts) if self.parts else np.empty(0, dtype=self.dtype)
        lengths = np.concatenate(self.lengths) if self.lengths else np.empty(0, dtype=np.int64)
        return KeyTokens(tokens, lengths, self.dropped)


def _with_ends(tokens: Ids, lengths: npt.NDArray[np.int64], eod: int) -> Ids:
    """`[T + D]` tokens of documents that are one behind the other, each followed by `eod`."""
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
