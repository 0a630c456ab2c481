"""Conversations of a chunk as documents of its column."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.datasets.tokenizers.rust_libraries import panics_as_errors
from trackbed.preprocess.chat.conversation import TokenIds
from trackbed.preprocess.chat.encode import ChatEncoder, MarkedDocuments, is_trained_to_end, num_labels, select
from trackbed.preprocess.columns import Column, Documents
from trackbed.preprocess.record_error import RecordError
from trackbed.preprocess.records import BadRecord, ConversationRecord

_Prepared = TokenIds | list[str]


@dataclass(frozen=True, slots=True)
class ConversationAppender:
    """Appends the documents of conversations to a column, without those in which nothing is trained.

    Args:
        column: the column.
        encoder: makes documents of conversations.
        encode_all: returns the ids of several texts, and the number of each; raises if one cannot be tokenised.
        encode_one: returns the document of a text of any length.
        part_chars: maximum length of a text that is tokenised together with others.
        eod: token appended to each document; None for none.
    """

    column: Column
    encoder: ChatEncoder
    encode_all: Callable[[list[str]], tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]
    encode_one: Callable[[str], Documents]
    part_chars: int
    eod: int | None

    def __call__(self, batch: Sequence[ConversationRecord]) -> list[BadRecord]:
        """Appends a batch. Returns the records that cannot be used."""
        bad: list[BadRecord] = []
        prepared: list[tuple[ConversationRecord, _Prepared]] = []
        for record in batch:
            try:
                prepared.append((record, self.encoder.prepare(record.conversation)))
            except RecordError as error:
                bad.append(BadRecord(record.line, str(error)))
        if not any(map(self._is_long, prepared)):
            # Tokenizers raise any exception, without naming the text, so each text is retried alone below.
            with contextlib.suppress(Exception), panics_as_errors():
                found = self.encoder.encode([one for _, one in prepared], self.encode_all)
                self._add(found, [record.place for record, _ in prepared])
                return bad
        for record, one in prepared:
            try:
                self._add(self.encoder.encode([one], self._encode_alone), [record.place])
            except RecordError as error:
                bad.append(BadRecord(record.line, str(error)))
        return bad

    def _is_long(self, prepared: tuple[ConversationRecord, _Prepared]) -> bool:
        return isinstance(prepared[1], list) and sum(map(len, prepared[1])) > self.part_chars

    def _encode_alone(self, texts: list[str]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        tokens, lengths, _ = self.encode_one(texts[0])
        return tokens, lengths

    def _add(self, found: MarkedDocuments, places: Sequence[int]) -> None:
        column = self.column
        if column.trained is None:
            return
        is_kept = num_labels(found) > 0
        if self.eod is not None:
            is_kept |= is_trained_to_end(found)
        num_empty = int(np.count_nonzero(found.lengths == 0))
        column.dropped += num_empty
        column.trained.untrained += int(np.count_nonzero(~is_kept)) - num_empty
        kept = select(found, is_kept)
        ones = np.ones(len(kept.lengths), dtype=np.int64)
        column.add(kept.tokens, kept.lengths, ones, self.eod, np.array(places, dtype=np.int64)[kept.records])
        if len(kept.lengths):
            column.trained.add(kept, has_end=self.eod is not None)
