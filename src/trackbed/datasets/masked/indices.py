"""The index of a dataset with masked tokens: what decides it, and how it is made.

Shapes: D documents of the split, N sentences in the file, R samples.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed.cache import Allocate, Arrays, ArraySpec
from trackbed.datasets.low_level import check_documents, data_stamps, most_tokens, num_documents
from trackbed.errors import ArgumentError, PlanError
from trackbed.index import ranges
from trackbed.kernels import build_mapping
from trackbed.tokens.idx_header import checksum_lengths

ARRAYS: Final = ("sample_index",)
_ENTRY_COST: Final = 4e5
_SENTENCE_COST: Final = 3.0
_SAMPLE_COST: Final = 45.0
"""Nanoseconds of an entry, of a sentence and of a sample."""


@dataclass(slots=True, eq=False)
class MaskedIndices:
    """The index that these arguments decide: `[R, 3]` first sentence, the one after the last, and length of samples.

    Args:
        dataset: has `sequence_lengths`, `[N]` tokens in each sentence, and `document_indices`, their borders.
        documents: `[D]` documents of the split, or None for all of them.
        num_samples: samples to give at least, or None for one epoch.
        max_length: tokens of a sample without special ones.
        short_probability: approximate share of samples with a random shorter length.
        seed: seed of lengths and order.
        min_sentences: fewest sentences of a sample.
        where: name of the dataset and its split, for errors.

    Raises:
        ArgumentError: a document is not in the dataset.
    """

    dataset: Any
    documents: npt.NDArray[np.integer[Any]] | None
    num_samples: int | None
    max_length: int
    short_probability: float
    seed: int
    min_sentences: int
    where: str = ""
    _run: tuple[int, int] | None = field(init=False, repr=False)
    _checksum: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        count = num_documents(self.dataset)
        self._run = (0, count) if self.documents is None else ranges.bounds_of(self.documents)
        check_documents(self.documents, self._run, count, where=self.where)

    @property
    def borders(self) -> npt.NDArray[np.int64]:
        """`[D + 1]` first sentence of each document, then the end of the last one; empty without documents."""
        borders: npt.NDArray[np.int64] = self.dataset.document_indices
        if self._run is not None:
            start, stop = self._run
            return borders[start : stop + 1] if stop > start else borders[:0]
        documents = np.asarray(self.documents)
        chosen: npt.NDArray[np.int64] = borders[np.append(documents, documents[-1] + 1)]
        return chosen

    @property
    def checksum(self) -> str:
        """CRC-32 of the lengths of the split's sentences and of the borders of its documents. Reads them once."""
        if not self._checksum:
            borders = self.borders
            start, stop = (int(borders.min()), int(borders.max())) if len(borders) else (0, 0)
            lengths: npt.NDArray[np.int32] = self.dataset.sequence_lengths
            self._checksum = checksum_lengths(lengths[start:stop], np.diff(borders, prepend=0))
        return self._checksum

    @property
    def stamps(self) -> str:
        """Inode, size and times of the files of the lengths, as text; empty where `decisions` holds the lengths."""
        return data_stamps(self.dataset) or ""

    def expected(self) -> Mapping[str, ArraySpec]:
        """Type and shape of the array; any number of rows that gives the samples."""
        is_wide = len(self.dataset) > np.iinfo(np.uint32).max
        dtype = np.dtype(np.uint64 if is_wide else np.uint32)
        return {"sample_index": ArraySpec(dtype, (-1, 3), least_rows=self.num_samples or 0)}

    def build(self, allocate: Allocate) -> Arrays:
        """The array."""
        _ = self.checksum  # while the lengths are in memory
        try:
            rows = build_mapping(
                self.borders,
                self.dataset.sequence_lengths,
                num_samples=self.num_samples,
                max_length=self.max_length,
                short_probability=self.short_probability,
                seed=self.seed,
                min_sentences=self.min_sentences,
            )
        except (ArgumentError, PlanError) as error:
            count = 0 if self.documents is None else len(self.documents)
            advice = "; was the file written with --split-sentences?" if count and isinstance(error, PlanError) else ""
            raise type(error)(f"{self.where}: {error}{advice}") from error
        return {"sample_index": rows}

    def cost(self) -> float:
        """Estimates the nanoseconds to build the array, from what is known without reading lengths."""
        tokens = most_tokens(self.dataset) or 0
        samples = max(self.num_samples or 0, tokens // self.max_length)
        return _ENTRY_COST + len(self.dataset) * _SENTENCE_COST + samples * _SAMPLE_COST

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the bytes, besides the files."""
        documents: Any = list(self._run) if self._run is not None else _digest(np.asarray(self.documents))
        return {
            "order": "megatron",
            "documents": documents,
            "num_samples": None if self.num_samples is None else int(self.num_samples),
            "max_length": int(self.max_length),
            "short_sequence_probability": float(self.short_probability),
            "random_seed": int(self.seed),
            "min_sentences": int(self.min_sentences),
        }


def _digest(documents: npt.NDArray[np.integer[Any]]) -> str:
    return hashlib.sha256(np.ascontiguousarray(documents).data).hexdigest()
