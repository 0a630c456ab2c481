"""Tokenisation of one chunk of the input, run by a worker.

Shapes: D documents of one key in the chunk, N sequences of them (one each, one for each sentence, or text and image),
T tokens of all.
"""

import contextlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from trackbed.datasets.tokenizers.rust_libraries import is_panic, one_core, panics_as_errors
from trackbed.datasets.tokenizers.sampling import check_repeatable
from trackbed.kernels import narrow
from trackbed.preprocess.chat.encode import ChatEncoder, ChatRules
from trackbed.preprocess.chat.trained_column import TrainedColumn
from trackbed.preprocess.chat.trained_spans import special_ids_of
from trackbed.preprocess.chunks import InputChunk
from trackbed.preprocess.columns import Column, Counts, Documents, Ids, KeyTokens, leave_out, without_tokens
from trackbed.preprocess.conversations import ConversationAppender
from trackbed.preprocess.images import ImageFolder, fit_text
from trackbed.preprocess.inputs import InputSegment
from trackbed.preprocess.long_text import PART_CHARS, split_text
from trackbed.preprocess.record_error import RecordError
from trackbed.preprocess.records import (
    BadRecord,
    ConversationRecord,
    TextRecord,
    read_conversations,
    read_segment,
)
from trackbed.preprocess.splitter import SentenceSplitter

_BATCH_CHARS: Final = 1 << 20  # bounds the memory of texts and ids in flight
_CHECKED_TEXTS: Final = 16  # of each batch, so that the comparison takes little time
_CHECKED_CHARS: Final = 512


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


Record = TypeVar("Record", TextRecord, ConversationRecord)


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
    chat: ChatRules | None = None
    """Rules for the texts of conversations; None if records are texts."""
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
            Column(self.dtype, self.unknown_id, keeps_empty=keeps_empty, keeps_sources=keeps_sources) for _ in self.keys
        ]
        segments = []
        with one_core():
            tokenise = self._reader(columns)
            for number, segment in enumerate(chunk.segments):
                for column in columns:
                    column.segment = number
                segments.append(tokenise(segment))
                if segments[-1].bad and not self.skip_bad:
                    break
        return TokenisedChunk(tuple(column.to_key_tokens() for column in columns), tuple(segments))

    def _reader(self, columns: list[Column]) -> Callable[[InputSegment], TokenisedSegment]:
        """Returns a function that reads a segment and appends its documents to the columns."""
        limit = self.max_record_bytes
        if self.chat is None:
            keys = self.keys if self.images is None else (*self.keys, self.images.config.key)
            return lambda segment: self._tokenise(
                read_segment(segment, keys=keys, max_record_bytes=limit), lambda batch: self._append(batch, columns)
            )
        columns[0].trained = TrainedColumn(special_ids_of(self.tokenizer))
        append = ConversationAppender(
            columns[0],
            ChatEncoder(self.chat, self.tokenizer, self.dtype),
            self._encode,
            self._encode_document,
            self.part_chars,
            self.eod,
        )
        return lambda segment: self._tokenise(read_conversations(segment, max_record_bytes=limit), append)

    def _tokenise(
        self, found: Iterator[Record | BadRecord | None], append: Callable[[list[Record]], list[BadRecord]]
    ) -> TokenisedSegment:
        """Has the records of a segment appended in batches; `append` returns those that cannot be tokenised."""
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
                waiting += record.size
            if waiting >= _BATCH_CHARS:
                bad += append(batch)
                batch, waiting = [], 0
            if bad and not self.skip_bad:
                break
        bad += append(batch)
        return TokenisedSegment(lines, blank, records, tuple(sorted(bad, key=lambda one: one.line)))

    def _append(self, batch: list[TextRecord], columns: list[Column]) -> list[BadRecord]:
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

    def _append_each(self, batch: list[TextRecord], columns: list[Column]) -> list[BadRecord]:
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

    def _add(self, keys: Sequence[Documents], columns: list[Column], places: Sequence[int]) -> None:
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

    def _append_with_images(self, batch: list[TextRecord], column: Column, images: ImageFolder) -> list[BadRecord]:
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
