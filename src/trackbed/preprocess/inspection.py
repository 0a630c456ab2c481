"""What is in a pair: counts, how long its documents are, and how the first of them read.

Shapes: N sequences, D documents, B buckets of the histogram.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.errors import FormatError
from trackbed.tokens import IndexedDataset, SequenceIndex, get_idx_path, open_index, verify

__all__ = ["Bucket", "Decoder", "FirstDocument", "Inspection", "first_documents", "inspect_pair"]

_STEP: Final = 1 << 20  # documents looked at together: bounds the memory that a look takes


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are in `[0, vocab_size)`."""

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        """The text of token ids."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of similar length."""

    shortest: int
    longest: int
    """Tokens, both ends included."""
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What is in a pair."""

    prefix: str
    dtype: str
    sequences: int
    documents: int
    tokens: int
    bin_bytes: int
    idx_bytes: int
    shortest: int
    """Tokens in the shortest document; 0 if there are no documents."""
    longest: int
    histogram: tuple[Bucket, ...]
    """From the bucket of the shortest document to that of the longest, without gaps."""


@dataclass(frozen=True, slots=True)
class FirstDocument:
    """How a document begins."""

    tokens: int
    """Tokens in all of it."""
    text: str
    """The text of its first tokens."""
    whole: bool
    """Whether those are all."""


def inspect_pair(path_prefix: str) -> Inspection:
    """Look at a pair, which is checked as `verify` does. Reads the index, and no tokens.

    Raises:
        FormatError: the pair is damaged.
        FileNotFoundError: one of its files is missing.
    """
    verified = verify(path_prefix)
    index = open_index(Path(get_idx_path(path_prefix)))
    counts = np.zeros(65, dtype=np.int64)
    shortest, longest = np.iinfo(np.int64).max, 0
    for start in range(0, verified.documents, _STEP):
        lengths = _document_lengths(index, start, min(start + _STEP, verified.documents))
        counts += np.bincount(bit_lengths(lengths), minlength=len(counts))
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
    return Inspection(
        prefix=path_prefix,
        dtype=verified.dtype,
        sequences=verified.sequences,
        documents=verified.documents,
        tokens=verified.tokens,
        bin_bytes=verified.bin_bytes,
        idx_bytes=verified.idx_bytes,
        shortest=shortest if verified.documents else 0,
        longest=longest,
        histogram=_buckets(counts),
    )


def first_documents(path_prefix: str, decoder: Decoder, *, num_documents: int, max_tokens: int) -> list[FirstDocument]:
    """How the first documents of a pair read.

    Args:
        path_prefix: path of the pair without `.bin` and `.idx`.
        decoder: the tokenizer that made the pair.
        num_documents: documents to read, at least 0; fewer come back if there are fewer.
        max_tokens: tokens of each document to read, at least 1.

    Raises:
        FormatError: the tokens are not the tokenizer's, or the pair is damaged.
        ArgumentError: one of the pair's files is missing.
    """
    dataset = IndexedDataset(path_prefix)
    borders = dataset.document_indices[: num_documents + 1].tolist()
    return [
        _first_tokens(dataset, decoder, document, range(*borders[document : document + 2]), max_tokens)
        for document in range(len(borders) - 1)
    ]


def bit_lengths(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`[N]` binary digits of `[N]` numbers, each at least 0 and below 2**53.

    >>> bit_lengths(np.array([0, 1, 2, 3, 4])).tolist()
    [0, 1, 2, 2, 3]
    """
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64)


def _document_lengths(index: SequenceIndex, start: int, stop: int) -> npt.NDArray[np.int64]:
    """`[stop - start]` tokens in each of the documents `[start, stop)`."""
    borders = index.document_indices[start : stop + 1]
    first, last = int(borders[0]), int(borders[-1])
    ends = np.zeros(last - first + 1, dtype=np.int64)
    np.cumsum(index.sequence_lengths[first:last], dtype=np.int64, out=ends[1:])
    return np.diff(ends[borders - first])


def _buckets(counts: npt.NDArray[np.int64]) -> tuple[Bucket, ...]:
    used = np.flatnonzero(counts)
    if len(used) == 0:
        return ()
    return tuple(
        Bucket(1 << (bits - 1) if bits else 0, (1 << bits) - 1, int(counts[bits]))
        for bits in range(int(used[0]), int(used[-1]) + 1)
    )


def _first_tokens(
    dataset: IndexedDataset, decoder: Decoder, document: int, sequences: range, max_tokens: int
) -> FirstDocument:
    lengths = dataset.sequence_lengths[sequences.start : sequences.stop]
    tokens = int(lengths.sum(dtype=np.int64))
    read = min(tokens, max_tokens)
    if read == 0:
        return FirstDocument(0, "", whole=True)
    # The sequences of a document are one behind the other, so that reading may go past the end of the first.
    ids = np.asarray(dataset.get(sequences.start, length=read))
    wrong = ids[(ids < 0) | (ids >= decoder.vocab_size) | (ids != np.floor(ids))]
    if len(wrong):
        msg = (
            f"{dataset.path_prefix}: tokens must be integers in [0, {decoder.vocab_size}) to be this tokenizer's, "
            f"found {wrong[0]} in document {document}"
        )
        raise FormatError(msg)
    return FirstDocument(tokens, decoder.detokenize(ids.astype(np.int64)), whole=read == tokens)
