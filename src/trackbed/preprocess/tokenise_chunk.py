"""Tokenisation of one chunk of the input, run by a worker.

Shapes: D documents of one key in the chunk, N sequences of them (one each, one for each sentence, or text and image),
T tokens of all.
"""

import contextlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trackbed.datasets.tokenizers.rust_libraries import is_panic, one_core, panics_as_errors
from trackbed.datasets.tokenizers.sampling import check_repeatable
from trackbed.kernels import narrow
from trackbed.preprocess.chunks import InputChunk
from trackbed.preprocess.images import ImageFolder, fit_text
from trackbed.preprocess.long_text import PART_CHARS, split_text
from trackbed.preprocess.records import BadRecord, RecordError, TextRecord, read_segment
from trackbed.preprocess.splitter import SentenceSplitter

Counts = npt.NDArray[np.int64]


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


_BATCH_CHARS: Final = 1 << 20  # bounds the memory of texts and ids in flight
_CHECKED_TEXTS: Final = 16  # of each batch, so that the comparison takes little time
_CHECKED_CHARS: Final = 512
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
    unknown_id: int | None = None
    """Id of unknown tokens, which are counted; None to count none."""
    skip_bad: bool
    """True to continue after a bad record."""
    max_record_bytes: int
    """Maximum size of one line, one plain text or one cell."""
    splitter: SentenceSplitter | None = None
    """Splitter of the texts into sequences; None if a text is one sequence."""
    drop_record: bool = False
    """True to leave a record out of the documents of all keys if one of its texts has no tokens; False if such a text
    becomes a sequence without text. With one key, it becomes no document."""
    images: ImageFolder | None = None
    """Images that become the second sequence of each document; None for texts alone."""
    keeps_sources: bool = False
    """True to return the segment and the place of each document."""
    part_chars: int = PART_CHARS
    """Maximum length of a text that is tokenised as a whole."""

    def __call__(self, chunk: InputChunk) -> TokenisedChunk:
        """Tokenises a chunk on one core."""
        keeps_empty, keeps_sources = len(self.keys) > 1, self.keeps_sources
        columns = [
            _Column(self.dtype, self.unknown_id, keeps_empty=keeps_empty, keeps_sources=keeps_sources)
            for _ in self.keys
        ]
        keys = self.keys if self.images is None else (*self.keys, self.images.config.key)
        segments = []
        with one_core():
            for number, segment in enumerate(chunk.segments):
                for column in columns:
                    column.segment = number
                found = read_segment(segment, keys=keys, max_record_bytes=self.max_record_bytes)
                segments.append(self._tokenise(found, columns))
                if segments[-1].bad and not self.skip_bad:
                    break
        return TokenisedChunk(tuple(column.to_key_tokens() for column in columns), tuple(segments))

    def _tokenise(self, found: Iterator[TextRecord | BadRecord | None], columns: "list[_Column]") -> TokenisedSegment:
        lines = blank = records = waiting = 0
        bad: list[BadRecord] = []
        batch: list[TextRecord] = []
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

    def _append(self, batch: list[TextRecord], columns: "list[_Column]") -> list[BadRecord]:
        """Appends the documents of a batch to the columns. Returns the records that cannot be tokenised."""
        self._check_repeatable(batch)
        if self.images is not None:
            return self._append_with_images(batch, columns[0], self.images)
        texts = [[record.texts[number] for record in batch] for number in range(len(columns))]
        if not any(len(text) > self.part_chars for column in texts for text in column):
            # Tokenizers raise any exception, without naming the text, so each text is retried alone below.
            with contextlib.suppress(Exception), panics_as_errors():
                found = [self._encode_documents(column) for column in texts]
                self._add(found, columns, [record.place for record in batch])
                return []
        return self._append_each(batch, columns)

    def _check_repeatable(self, batch: list[TextRecord]) -> None:
        """Checks that the beginnings of a few texts have the same tokens each time."""
        kind = type(self.tokenizer)
        if not kind.__module__.startswith("trackbed."):  # those sample nothing
            texts = [record.texts[0][:_CHECKED_CHARS] for record in batch[:_CHECKED_TEXTS]]
            check_repeatable(self._encode, texts, where=f"the tokenizer {kind.__name__}")

    def _append_each(self, batch: list[TextRecord], columns: "list[_Column]") -> list[BadRecord]:
        """Does the same as `_append`, text by text."""
        bad = []
        for record in batch:
            try:
                documents = [self._encode_document(text) for text in record.texts]
            except RecordError as error:
                bad.append(BadRecord(record.line, str(error)))
                continue
            self._add(documents, columns, [record.place])
        return bad

    def _add(self, keys: Sequence[Documents], columns: "list[_Column]", places: Sequence[int]) -> None:
        """Adds the documents of each key to its column."""
        kept = np.array(places, dtype=np.int64)
        if self.drop_record:
            is_left_out = np.logical_or.reduce([without_tokens(documents) for documents in keys])
            if is_left_out.any():
                keys, kept = leave_out(keys, is_left_out), kept[~is_left_out]
                for column in columns:
                    column.dropped += int(np.count_nonzero(is_left_out))
        for column, documents in zip(columns, keys, strict=True):
            column.add(*documents, self.eod, kept)

    def _append_with_images(self, batch: list[TextRecord], column: "_Column", images: ImageFolder) -> list[BadRecord]:
        """Appends documents of a text and an image."""
        bad = []
        for record in batch:
            text, name = record.texts
            try:
                tokens, _, _ = self._encode_document(text)
                image = images.read(name)
            except RecordError as error:
                bad.append(BadRecord(record.line, str(error)))
                continue
            column.add_pair(fit_text(tokens, pad_length=images.config.pad_length, eod=self.eod), image, record.place)
        return bad

    def _encode_documents(self, texts: list[str]) -> Documents:
        """Returns the documents of some texts."""
        if self.splitter is None:
            return Documents(*self._encode(texts), np.ones(len(texts), dtype=np.int64))
        documents = [self.splitter.split(text) for text in texts]
        counts = np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))
        return Documents(*self._encode(list(chain.from_iterable(documents))), counts)

    def _encode_document(self, text: str) -> Documents:
        """Does the same as `_encode_documents` for one text of any length."""
        with _fails_as("splitter"):
            sequences = [text] if self.splitter is None else self.splitter.split(text)
        with _fails_as("tokenizer"):
            found = [self._encode_group(group) for group in _groups(sequences, self.part_chars)]
        tokens = [np.empty(0, dtype=self.dtype), *(tokens for tokens, _ in found)]
        lengths = [np.empty(0, dtype=np.int64), *(lengths for _, lengths in found)]
        counts = np.array([len(sequences)], dtype=np.int64)
        return Documents(np.concatenate(tokens), np.concatenate(lengths), counts)

    def _encode_group(self, texts: list[str]) -> tuple[Ids, Counts]:
        """Does the same as `_encode`; a single text may have any length."""
        if len(texts) > 1:
            return self._encode(texts)

        def tokenize(part: str) -> Ids:
            return self._as_numbers(self.tokenizer.tokenize_batch([part])[0])

        parts = [tokenize(part) for part in split_text(texts[0], tokenize, part_chars=self.part_chars)]
        tokens = np.concatenate(parts)
        return tokens, np.array([len(tokens)], dtype=np.int64)

    def _encode(self, texts: list[str]) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Returns the concatenated tokens of all texts, and the number of tokens of each."""
        if isinstance(self.tokenizer, FlatTokenizer):
            ids, offsets = self.tokenizer.tokenize_flat(texts)
            return self._as_numbers(ids), np.diff(offsets)
        documents = [self._as_numbers(ids) for ids in self.tokenizer.tokenize_batch(texts)]
        if not documents:
            return np.empty(0, dtype=self.dtype), np.empty(0, dtype=np.int64)
        return np.concatenate(documents), np.fromiter(map(len, documents), dtype=np.int64, count=len(documents))

    def _as_numbers(self, ids: Any) -> Ids:
        """Converts ids to the dtype of the file; raises if one does not fit."""
        if isinstance(ids, list):
            # The fastest conversion of a list that checks every number; `narrow` below names the one that fails.
            with contextlib.suppress(struct.error):
                return np.frombuffer(struct.pack(f"{len(ids)}{self.dtype.char}", *ids), dtype=self.dtype)
        return np.frombuffer(narrow(np.ascontiguousarray(ids), self.dtype), dtype=self.dtype)


@contextlib.contextmanager
def _fails_as(what: str) -> Iterator[None]:
    """Converts any error but a lack of memory to one that makes a bad record."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise RecordError(f"the {what} must accept the text, found an error: {error}") from error


def _groups(texts: list[str], max_chars: int) -> Iterator[list[str]]:
    """Yields the texts in groups of at most `max_chars` characters, or of one text."""
    group: list[str] = []
    filled = 0
    for text in texts:
        if group and filled + len(text) > max_chars:
            yield group
            group, filled = [], 0
        group.append(text)
        filled += len(text)
    if group:
        yield group


@dataclass(slots=True)
class _Column:
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
        tokens = np.concatenate([np.empty(0, dtype=self.dtype), *self.parts])
        nothing = np.empty(0, dtype=np.int64)
        lengths, counts = (np.concatenate([nothing, *numbers]) for numbers in (self.lengths, self.counts))
        unknown = None if self.unknown_id is None else self.unknown
        segments, places = (
            np.concatenate([nothing, *found]) if self.keeps_sources else None for found in (self.segments, self.places)
        )
        return KeyTokens(tokens, lengths, counts, self.dropped, unknown, self.empty, segments, places)


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
