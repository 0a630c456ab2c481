"""The trained spans of texts, in characters, and the tokens that they are made of.

Shapes: D documents, N spans, R runs of trained tokens, T tokens of all documents.
"""

import contextlib
import unicodedata
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trackbed.datasets.tokenizers.base import Adapter
from trackbed.errors import ArgumentError
from trackbed.preprocess.record_error import RecordError

Numbers = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Runs of trained tokens: see `TrainedColumns`."""

    counts: Numbers
    """`[D]` number of runs of each document."""
    runs: Numbers
    """`[R, 2]` first token of each run in its document, and number of tokens."""


class TokenRanges:
    """Finds the part of a text that each token stands for.

    With a tokenizer that knows the bytes of each id, from these alone; else by tokenising the text again.

    Args:
        tokenizer: tokenizer of the texts.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_lengths = getattr(tokenizer, "byte_lengths", None)

    def trained_runs(self, texts: Sequence[Sequence[str]], ids: npt.NDArray[Any], lengths: Numbers) -> Runs:
        """Returns the runs of tokens of which any character is in a trained span.

        Args:
            texts: D texts in parts, of which every second one is trained.
            ids: `[T]` tokens of all texts.
            lengths: `[D]` tokens of each.

        Raises:
            RecordError: it cannot be said which characters a token stands for.
        """
        counts = np.array([len(parts) // 2 for parts in texts], dtype=np.int64)
        found = None if self._byte_lengths is None else _spans_by_bytes(texts, self._byte_lengths[ids], lengths)
        if found is None:
            spans = [
                self._spans(parts, part)
                for parts, part in zip(texts, np.split(ids, np.cumsum(lengths)[:-1]), strict=True)
            ]
            found = _all([first for first, _ in spans]), _all([stop for _, stop in spans])
        return _joined(counts, *found)

    def _spans(self, parts: Sequence[str], ids: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
        """Returns the first token of each trained span of a text, and the one behind its last."""
        if len(parts) == 1:
            return _NONE, _NONE
        if len(parts) == 2 and not parts[0]:
            return np.zeros(1, dtype=np.int64), np.array([len(ids)], dtype=np.int64)
        starts, stops = self._ranges("".join(parts), ids)
        ends = np.cumsum([len(part) for part in parts])
        return _tokens_between(starts, stops, ends[:-1:2][: len(parts) // 2], ends[1::2])

    def _ranges(self, text: str, ids: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
        """Returns the first character of each token in a text, and the one behind its last."""
        if not isinstance(self._tokenizer, Adapter):
            raise RecordError(f"{type(self._tokenizer).__name__}: masks need the characters of tokens, found none")
        try:
            return self._tokenizer.ranges(ids.tolist(), text)
        except NotImplementedError as error:
            raise RecordError(f"masks need a tokenizer that knows the characters of tokens: {error}") from None


def special_ids_of(tokenizer: Any) -> Numbers:
    """Returns the ids of the special tokens of a tokenizer, which end turns."""
    found = set(getattr(tokenizer, "special_token_ids", ()))
    with contextlib.suppress(ArgumentError, AttributeError, NotImplementedError):  # it may lack one
        found.add(int(tokenizer.eod))
    return np.array(sorted(found), dtype=np.int64)


_NONE = np.empty(0, dtype=np.int64)


def _all(parts: Sequence[Numbers]) -> Numbers:
    return np.concatenate([_NONE, *parts])


def _spans_by_bytes(texts: Sequence[Sequence[str]], sizes: Numbers, lengths: Numbers) -> tuple[Numbers, Numbers] | None:
    """Returns the spans of tokens of all texts; None if the sizes of a text's tokens do not add up to its own.

    Args:
        texts: D texts in parts, of which every second one is trained.
        sizes: `[T]` bytes of each token.
        lengths: `[D]` tokens of each text.
    """
    parts = list(chain.from_iterable(texts))
    if not all(map(_is_normal, parts)):
        return None
    ends = np.cumsum([len(part) if part.isascii() else len(part.encode()) for part in parts])
    num_parts = np.array([len(one) for one in texts], dtype=np.int64)
    last_parts = np.cumsum(num_parts) - 1
    stops = np.concatenate([[0], np.cumsum(sizes)])
    last_tokens = np.cumsum(lengths)
    if (stops[last_tokens] != ends[last_parts]).any():
        return None
    is_trained = (np.arange(len(parts)) - np.repeat(last_parts + 1 - num_parts, num_parts)) % 2 == 1
    at = np.flatnonzero(is_trained)  # never the first part
    first, stop = _tokens_between(stops[:-1], stops[1:], ends[at - 1], ends[at])
    base = np.repeat(last_tokens - lengths, num_parts // 2)
    return first - base, stop - base


def _is_normal(text: str) -> bool:
    """True if Unicode's normal form C, which some tokenizers bring texts into, leaves a text as it is."""
    return text.isascii() or unicodedata.is_normalized("NFC", text)


def _tokens_between(starts: Numbers, stops: Numbers, begins: Numbers, ends: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the first token, and the one behind the last, that share a byte or a character with each span.

    Args:
        starts: `[T]` first byte or character of each token.
        stops: `[T]` those behind the last ones.
        begins: `[N]` first byte or character of each span.
        ends: `[N]` those behind the last ones.
    """
    first, stop = np.searchsorted(stops, begins, side="right"), np.searchsorted(starts, ends, side="left")
    return np.where(ends > begins, first, stop), stop


def _joined(counts: Numbers, firsts: Numbers, stops: Numbers) -> Runs:
    """Joins the spans of tokens of a document that touch or share a token.

    Args:
        counts: `[D]` number of spans of each document.
        firsts: `[N]` first token of each span in its document, not falling.
        stops: `[N]` the one behind its last; a span with none is left out.

    >>> _joined(np.array([3, 1]), np.array([0, 2, 7, 1]), np.array([2, 5, 7, 3])).runs.tolist()
    [[0, 5], [1, 2]]
    """
    documents = np.repeat(np.arange(len(counts)), counts)
    kept = stops > firsts
    documents, firsts, stops = documents[kept], firsts[kept], stops[kept]
    if not len(firsts):
        return Runs(np.zeros(len(counts), dtype=np.int64), np.empty((0, 2), dtype=np.int64))
    is_new = np.ones(len(firsts), dtype=np.bool_)
    is_new[1:] = (documents[1:] != documents[:-1]) | (firsts[1:] > stops[:-1])
    at = np.flatnonzero(is_new)
    ends = np.maximum.reduceat(stops, at)
    return Runs(np.bincount(documents[at], minlength=len(counts)), np.stack([firsts[at], ends - firsts[at]], axis=1))
