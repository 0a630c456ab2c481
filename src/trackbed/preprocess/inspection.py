"""Inspection of a pair: counts, document lengths, and the text of the first documents.

Shapes: N sequences, D documents, B bins of the histogram.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from trackbed.datasets.tokenizers.rust_libraries import panics_as_errors
from trackbed.errors import FormatError
from trackbed.files.stores import is_address
from trackbed.tokens import IndexedDataset, ObjectStorageConfig, SequenceIndex, default_idx_cache
from trackbed.tokens.content import PairContent
from trackbed.tokens.trained_tokens import TrainedCounts, TrainedTokens
from trackbed.tokens.verify import verify_opened

_REPLACEMENT: Final = "\ufffd"
"""Text of bytes that are no character, such as the first ones of one that goes on."""
_CONTEXT: Final = 16
"""Tokens before a run that may decide its text."""
_STEP: Final = 1 << 20  # documents per step: bounds the memory of an inspection


class Decoder(Protocol):
    """Interface of a tokenizer that decodes."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, which are in `[0, vocab_size)`."""

    def detokenize(self, ids: npt.NDArray[np.integer[Any]]) -> str:
        """Returns the text of token ids."""


@dataclass(frozen=True, slots=True)
class LengthBin:
    """Bin of the histogram: documents of similar length."""

    shortest: int
    longest: int
    """Tokens; the bin includes both ends."""
    documents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Contents of a pair."""

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
    histogram: tuple[LengthBin, ...]
    """`[B]` bins without gaps: the first one has the shortest document, the last one the longest."""
    modes: dict[int, int]
    """Number of sequences of each mode; empty for a pair without modes."""
    trained: TrainedCounts | None = None
    """Counts of its mask; None if all tokens are trained."""


@dataclass(frozen=True, slots=True)
class TextRun:
    """Text of consecutive tokens that are trained, or are not."""

    text: str
    counts: bool
    """True if they are trained."""


@dataclass(frozen=True, slots=True)
class FirstDocument:
    """Beginning of a document."""

    tokens: int
    """Tokens in the whole document; of a pair with modes, in its sequences of mode 0."""
    text: str
    """Text of its first tokens."""
    whole: bool
    """True if `text` covers all tokens."""
    runs: tuple[TextRun, ...] | None = None
    """The text in runs; None for a pair without a mask."""


def inspect_pair(path_prefix: str, *, idx_cache: str | None = None) -> Inspection:
    """Inspects a pair, with the checks of `verify`. Reads the index, but no tokens.

    Args:
        path_prefix: path or address of the pair without `.bin` and `.idx`.
        idx_cache: folder of copies of `.idx` objects, for an address; None for `default_idx_cache()`.

    Raises:
        FormatError: the pair is damaged.
        FileNotFoundError: one of its files is missing.
    """
    content = PairContent.open(path_prefix, idx_cache=idx_cache)
    verified, index = verify_opened(content), content.index
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
        histogram=_bins(counts),
        modes=_count_modes(_modes_of(index)),
        trained=None if (trained := TrainedTokens.open(path_prefix, idx_cache=idx_cache)) is None else trained.counts(),
    )


def first_documents(
    path_prefix: str, decoder: Decoder, *, num_documents: int, max_tokens: int, idx_cache: str | None = None
) -> list[FirstDocument]:
    """Decodes the first documents of a pair; of a pair with modes, the sequences of mode 0.

    Args:
        path_prefix: path of the pair without `.bin` and `.idx`.
        decoder: the tokenizer that made the pair.
        num_documents: maximum number of documents to read, at least 0.
        idx_cache: folder of copies of `.idx` objects, for an address; None for `default_idx_cache()`.
        max_tokens: maximum number of tokens to read of each document, at least 1.

    Raises:
        FormatError: a token is no id of the tokenizer, or the pair is damaged.
        ArgumentError: one of the pair's files is missing.
    """
    is_stored = is_address(path_prefix)
    storage = ObjectStorageConfig(idx_cache or default_idx_cache()) if is_stored else None
    dataset = IndexedDataset(path_prefix, mmap=not is_stored, object_storage_config=storage)
    modes = _modes_of(dataset.index)
    # Masks are of whole documents, and texts of a pair with modes leave some sequences out.
    trained = None if modes is not None else TrainedTokens.open(path_prefix, idx_cache=idx_cache)
    borders = dataset.document_indices[: num_documents + 1].tolist()
    return [
        _first_tokens(dataset, decoder, document, sequences, max_tokens, trained)
        for document in range(len(borders) - 1)
        for sequences in [_texts(modes, borders[document], borders[document + 1])]
    ]


def bit_lengths(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns the `[N]` bit lengths of `[N]` numbers, each at least 0 and below 2**53.

    >>> bit_lengths(np.array([0, 1, 2, 3, 4])).tolist()
    [0, 1, 2, 2, 3]
    """
    return np.frexp(numbers.astype(np.float64))[1].astype(np.int64)


def _document_lengths(index: SequenceIndex, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Returns the `[stop - start]` token counts of the documents `[start, stop)`."""
    borders = index.document_indices[start : stop + 1]
    first, last = int(borders[0]), int(borders[-1])
    ends = np.zeros(last - first + 1, dtype=np.int64)
    np.cumsum(index.sequence_lengths[first:last], dtype=np.int64, out=ends[1:])
    return np.diff(ends[borders - first])


def _bins(counts: npt.NDArray[np.int64]) -> tuple[LengthBin, ...]:
    used = np.flatnonzero(counts)
    if len(used) == 0:
        return ()
    return tuple(
        LengthBin(1 << (bits - 1) if bits else 0, (1 << bits) - 1, int(counts[bits]))
        for bits in range(int(used[0]), int(used[-1]) + 1)
    )


def _modes_of(index: SequenceIndex) -> npt.NDArray[np.int8] | None:
    """Returns the `[N]` modes of the sequences; None for a pair without modes."""
    has_modes = index.ends.size_bytes > index.ends.header.size_bytes
    return index.reopened(multimodal=True).sequence_modes if has_modes else None


def _count_modes(modes: npt.NDArray[np.int8] | None) -> dict[int, int]:
    counts: Counter[int] = Counter()
    if modes is None:
        return {}
    for start in range(0, len(modes), _STEP):
        found, numbers = np.unique(modes[start : start + _STEP], return_counts=True)
        counts.update(dict(zip(found.tolist(), numbers.tolist(), strict=True)))
    return dict(sorted(counts.items()))


def _texts(modes: npt.NDArray[np.int8] | None, start: int, stop: int) -> npt.NDArray[np.int64]:
    """Returns the sequences of a document whose mode is 0."""
    if modes is None:
        return np.arange(start, stop, dtype=np.int64)
    return start + np.flatnonzero(modes[start:stop] == 0)


def _first_tokens(
    dataset: IndexedDataset,
    decoder: Decoder,
    document: int,
    sequences: npt.NDArray[np.int64],
    max_tokens: int,
    trained: TrainedTokens | None,
) -> FirstDocument:
    lengths = dataset.sequence_lengths[sequences]
    tokens = int(lengths.sum(dtype=np.int64))
    read = min(tokens, max_tokens)
    if read == 0:
        return FirstDocument(0, "", whole=True, runs=None if trained is None else ())
    parts, missing = [], read
    for number, length in zip(sequences.tolist(), lengths.tolist(), strict=True):
        parts.append(np.asarray(dataset.get(number, length=min(length, missing))))
        missing -= len(parts[-1])
        if missing == 0:
            break
    ids = np.concatenate(parts)
    wrong = ids[(ids < 0) | (ids >= decoder.vocab_size) | (ids != np.floor(ids))]
    if len(wrong):
        raise FormatError(
            f"{dataset.path_prefix}: tokens must be integers in [0, {decoder.vocab_size}) to be this tokenizer's, "
            f"found {wrong[0]} in document {document}"
        )
    where = f"{dataset.path_prefix}: the tokenizer must decode document {document}"
    runs = None
    if trained is not None:
        numbered = zip(_trained_of(trained, document, tokens, dataset)[:read].tolist(), ids.tolist(), strict=True)
        grouped = [(is_trained, [token for _, token in run]) for is_trained, run in groupby(numbered, itemgetter(0))]
        texts = texts_of_runs([run for _, run in grouped], lambda some: _decoded(decoder, some, where=where))
        runs = tuple(TextRun(text, is_trained) for text, (is_trained, _) in zip(texts, grouped, strict=True))
    return FirstDocument(tokens, _decoded(decoder, ids, where=where), whole=read == tokens, runs=runs)


def texts_of_runs(runs: Sequence[list[int]], decode: Callable[[list[int]], str]) -> list[str]:
    """Returns the text of each run of a document's tokens, as it stands in the text of the whole.

    Tokens that are decoded alone may lack spaces, which tokenizers leave out at a beginning. A character of several
    tokens belongs to the run of the last one.

    Args:
        runs: tokens of each run.
        decode: returns the text of tokens.

    >>> texts_of_runs([[1], [2, 3]], lambda ids: " ".join("-abc"[one] for one in ids))
    ['a', ' b c']
    """
    texts: list[str] = []
    context: list[int] = []
    for run in runs:
        before, whole = decode(context), decode(context + run)
        kept = before if whole.startswith(before) else before.rstrip(_REPLACEMENT)
        if texts and whole.startswith(kept):
            texts[-1] = texts[-1].removesuffix(before[len(kept) :])
            texts.append(whole[len(kept) :])
        else:
            texts.append(decode(run))
        context = (context + run)[-_CONTEXT:]
    return texts


def _trained_of(trained: TrainedTokens, document: int, tokens: int, dataset: IndexedDataset) -> npt.NDArray[np.bool_]:
    try:
        return trained.of(document, tokens)
    except (FormatError, IndexError) as error:
        raise FormatError(f"{dataset.path_prefix}: {error}") from error


def _decoded(decoder: Decoder, ids: npt.ArrayLike, *, where: str) -> str:
    try:
        with panics_as_errors():
            return decoder.detokenize(np.asarray(ids).astype(np.int64))
    except RuntimeError as error:
        raise FormatError(f"{where}, found an error: {error}") from error
