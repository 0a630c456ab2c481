"""Base of datasets whose samples are sentences with masked words.

Shapes: D documents of the split, R samples, T tokens of a sample.
"""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from operator import index as as_index
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cache import Kind, LazyArrays, damage
from trackbed.datasets.batches.forms import MaskedForm, MaskedSpec
from trackbed.datasets.batches.reader import BatchForm
from trackbed.datasets.batches.sources import SampleLayout
from trackbed.datasets.cached import CachedDataset, is_overridden
from trackbed.datasets.low_level import num_documents, open_group, open_pair, reads_in_rounds
from trackbed.datasets.masked.config import MaskedWordPieceDatasetConfig
from trackbed.datasets.masked.indices import ARRAYS, MaskedIndices
from trackbed.datasets.masked.masking import (
    CONTINUES,
    UNKNOWN,
    MaskingRules,
    WordPieces,
    digest_of,
    mask_words,
    word_pieces_of,
)
from trackbed.datasets.megatron_dataset import LowLevelDataset
from trackbed.datasets.samples import IndexArray, IndexArrays, SampleLocations
from trackbed.errors import ArgumentError, CacheError, FormatError
from trackbed.index.splits import Split
from trackbed.kernels import MaskingTable, Sentences

_KIND: Final = Kind()
_SEEDS: Final = 1 << 32
_MASKING_HOOKS: Final = ("_create_masked_lm_predictions", "_get_token_mask")


class MaskedWordPieceDataset(CachedDataset):
    """Samples of whole sentences, each from one document, some of whose words are masked.

    A subclass calls `_build_sample_index` in its constructor, and makes the samples. In both orders, "megatron" and
    "balanced", they equal those of megatron-core 0.16.1, bit for bit.

    `sample_index` `[R, 3]` is mapped from the cache, and built first if it is missing.

    Args:
        indexed_dataset: the sentences, and the borders of their documents.
        dataset_path: their prefix, for descriptions and errors.
        indexed_indices: `[D]` documents that belong to this split; None for all of them.
        num_samples: lowest number of samples, or None for one epoch.
        index_split: the split.
        config: configuration of the samples.
    """

    config: MaskedWordPieceDatasetConfig
    sample_index = IndexArray()
    _KIND: ClassVar[Kind] = _KIND
    _INDEX_HOOK: ClassVar[str] = "_build_sample_index"
    _SAMPLE_HOOKS: ClassVar[tuple[str, ...]] = ("__getitem__", *_MASKING_HOOKS)

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: npt.NDArray[np.integer[Any]] | None,
        num_samples: int | None,
        index_split: Split,
        config: MaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(
            indexed_dataset,
            dataset_path,
            indexed_indices,  # type: ignore[arg-type]  # None says "all of them"
            num_samples,
            index_split,
            config,
        )
        self._arrays = IndexArrays(*ARRAYS)
        self._indices: MaskedIndices | None = None

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Returns the number of documents in the file: a masked dataset is split by document."""
        return num_documents(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: MaskedWordPieceDatasetConfig) -> LowLevelDataset:  # type: ignore[override]
        """Opens the pair at a prefix, or the group of pairs that `groups` lists for it.

        Raises:
            ArgumentError: a file is missing, or there is no prefix.
            FormatError: the pair is damaged, or its tokens are not integers.
        """
        if dataset_path is None:
            raise ArgumentError("a masked dataset must have a blend, found none: give blend or blend_per_split")
        return open_group(dataset_path, config) or open_pair(dataset_path, config)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Returns the names of the configuration fields that belong to the dataset's identity."""
        return [
            *CachedDataset._key_config_attributes(),
            "masking_probability",
            "short_sequence_probability",
            "masking_max_ngram",
            "masking_do_full_word",
            "masking_do_permutation",
            "masking_use_longer_ngrams",
            "masking_use_geometric_distribution",
        ]

    def _build_sample_index(self, sequence_length: int, min_sentences_per_sample: int) -> npt.NDArray[np.integer[Any]]:
        """Returns `sample_index`, which is built first if it is missing.

        Subclasses call this in their constructors, under Megatron Core's name, and may override it.

        Args:
            sequence_length: tokens of a sample without special ones.
            min_sentences_per_sample: fewest sentences of a sample.
        """
        self._set_rules(sequence_length, min_sentences_per_sample)
        if self._arrays.is_missing:
            self._arrays.open(self._request(), self._ingredients().build)
        rows: npt.NDArray[np.integer[Any]] = self._arrays["sample_index"]
        return rows

    def _set_rules(self, sequence_length: int, min_sentences: int) -> None:
        self._indices = MaskedIndices(
            dataset=self.dataset,
            documents=self.indices,
            num_samples=self.num_samples,
            max_length=sequence_length,
            short_probability=self.config.short_sequence_probability or 0.0,
            seed=self.config.random_seed,
            min_sentences=min_sentences,
            where=self._where,
        )

    def _request_index(self, sequence_length: int, min_sentences: int) -> None:
        """Requests the index, or takes the index that a subclass builds."""
        if self.builds_its_indices():
            self.sample_index = np.ascontiguousarray(self._build_sample_index(sequence_length, min_sentences))
            return
        self._set_rules(sequence_length, min_sentences)
        if not self.config.defer_npy_index_mmap:
            self._arrays.open(self._request(), self._ingredients().build)

    @property
    def _index(self) -> IndexArrays:
        return self._arrays

    @property
    def _opened(self) -> npt.NDArray[np.integer[Any]]:
        """`[R, 3]` the index; opened first if that was deferred."""
        if self._arrays.is_missing:
            self._arrays.open_late(self._request(), self._ingredients().build, self.config)
        rows: npt.NDArray[np.integer[Any]] = self._arrays["sample_index"]
        return rows

    def _ingredients(self) -> MaskedIndices:
        if self._indices is None:
            raise ArgumentError(
                f"{type(self).__name__} must call _build_sample_index in its constructor, found that it does not"
            )
        return self._indices

    def _index_decisions(self) -> dict[str, Any]:
        return {} if self._indices is None else self._indices.decisions()

    def _shaping(self) -> dict[str, Any]:
        return {}

    def _agreed_besides(self) -> dict[str, Any]:
        try:
            return {"vocabulary": digest_of(self._pieces)}
        except ArgumentError:  # a subclass may do without
            return {}

    def _checksum(self) -> str:
        arrays = self._arrays.arrays
        found = arrays.resolve().data_crc32 if isinstance(arrays, LazyArrays) else ""
        return found or self._ingredients().checksum

    @property
    def _stem(self) -> str:
        return f"{self.unique_description_hash}-{type(self).__name__}"

    def __getstate__(self) -> dict[str, Any]:
        """State without what a copy computes again."""
        return {**super().__getstate__(), "_arrays": copy(self._arrays)}  # they may be replaced

    def __len__(self) -> int:
        """R, samples in the dataset: at least as many as were requested."""
        arrays = self._arrays.arrays
        if isinstance(arrays, LazyArrays) and self._arrays.replacement("sample_index") is None:
            return arrays.resolve().specs["sample_index"].shape[0]
        return len(self._opened)

    def can_give(self, num_samples: int) -> bool:
        """True if there are at least `num_samples` samples. Does not need an index that is not built yet."""
        arrays = self._arrays.arrays
        is_pending = arrays is None or (isinstance(arrays, LazyArrays) and not arrays.is_resolved)
        return (is_pending and num_samples <= (self.num_samples or 0)) or num_samples <= len(self)

    def layout(self) -> SampleLayout | None:
        """Returns the layout of the samples in their files; None if a subclass makes them."""
        rows = None if self._masks_itself() else self._kernel_rows()
        return None if rows is None else Sentences(rows)

    def _kernel_rows(self) -> npt.NDArray[np.integer[Any]] | None:
        """Returns the index as the kernel takes it, a copy where a subclass made it otherwise; None if it cannot be."""
        rows = np.asarray(self._opened)
        is_plain = rows.ndim == 2 and rows.shape[1] == 3 and rows.dtype.kind in "iu"
        if not is_plain or (rows.dtype.kind == "i" and len(rows) and rows.min() < 0):
            return None
        dtype = np.uint32 if rows.dtype == np.uint32 else np.uint64
        return np.require(rows, dtype=dtype, requirements=["C", "A"])

    def batch_form(self, members: Sequence[Any], dataset_id: torch.dtype | None) -> BatchForm:
        """Returns the form of batches of such samples; see `CachedDataset.batch_form`."""
        return MaskedForm(self._table(), MaskedSpec(lengths=self._lengths(), dataset_id=dataset_id))

    def _table(self) -> MaskingTable:
        """Returns what decides the samples, for the kernel. A subclass whose samples a kernel makes implements it."""
        raise NotImplementedError

    def _lengths(self) -> tuple[tuple[str, int | None], ...]:
        """Returns the names of a sample's arrays, and their lengths; None for a number."""
        raise NotImplementedError

    def _common_table(self) -> dict[str, Any]:
        """Returns the fields of the table that BERT and T5 share."""
        pieces, rules = self._pieces, self._rules
        return {
            "length": self.config.sequence_length,
            "seed": self.config.random_seed,
            "pad": self._pad_token_id,
            "cls": pieces.cls,
            "sep": pieces.sep,
            "mask": pieces.mask,
            "full_words": bool(self.config.masking_do_full_word),
            "is_geometric": rules.uses_geometric_distribution,
            "permutes": rules.permutes,
            "probability": rules.probability,
            "cumulative": rules.cumulative,
            "kinds": pieces.kinds,
        }

    def _masks_itself(self) -> bool:
        """True if it overrides what is masked, so that no kernel makes its samples."""
        return is_overridden(self, _MASKING_HOOKS)

    def _from_kernel(self, idx: int) -> dict[str, Any] | None:
        """Returns the sample at a position; None if it needs Python, which also says what is wrong with it."""
        number = as_index(idx)
        if self._masks_itself() or not -(1 << 63) <= number < 1 << 63:
            return None
        positions = np.array([number], dtype=np.int64)
        batch = self._cached_batch_reader.gather(self._draw(positions), None, num_threads=1)
        if batch is None or batch.arrays is None:
            return None
        found = batch.arrays.arrays.items()
        return {name: array[0] if array.ndim > 1 else int(array[0]) for name, array in found}

    def _draw(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        return np.zeros(len(positions), dtype=np.int32), positions

    @cached_property
    def _pieces(self) -> WordPieces:
        return word_pieces_of(self.config.tokenizer)

    @cached_property
    def _rules(self) -> MaskingRules:
        config = self.config
        return MaskingRules(
            probability=float(config.masking_probability or 0),
            max_ngram=int(config.masking_max_ngram or 1),
            uses_longer_ngrams=bool(config.masking_use_longer_ngrams),
            uses_geometric_distribution=bool(config.masking_use_geometric_distribution),
            permutes=bool(config.masking_do_permutation),
        )

    def _read(self, idx: int) -> tuple[list[list[int]], int, np.random.RandomState]:
        """Returns the sentences of the sample at a position, its target length, and its stream of random numbers."""
        rows = np.asarray(self._opened)
        if not -len(rows) <= idx < len(rows):
            raise IndexError(f"a sample must be in [-{len(rows)}, {len(rows)}), found {idx}")
        if rows.dtype.kind not in "iu":
            wanted = "whole numbers"
            raise self._damage(wanted, str(rows.dtype))
        first, stop, target = rows[idx].tolist()
        most = self.config.sequence_length
        if not 0 <= first < stop <= len(self.dataset) or not 0 < target <= most:
            wanted = f"sentences in [0, {len(self.dataset)}) and a length of at most {most}"
            raise self._damage(wanted, f"{first}, {stop} and {target} in row {idx}")
        if reads_in_rounds(self.dataset):
            sentences = [tokens.tolist() for tokens in self.dataset.get_several(range(first, stop))]
        else:
            sentences = [np.asarray(self.dataset[number]).tolist() for number in range(first, stop)]
        # As in Megatron Core, position -1 has the last sample's text, and a stream of its own.
        return sentences, target, np.random.RandomState((self.config.random_seed + int(idx)) % _SEEDS)

    def _damage(self, wanted: str, found: str) -> CacheError:
        return damage(self._arrays.arrays or {}, list(ARRAYS), wanted, found)

    def _create_masked_lm_predictions(
        self, token_ids: Sequence[int], target_sequence_length: int, numpy_random_state: np.random.RandomState
    ) -> tuple[list[int], list[int], list[int], list[int], list[tuple[list[int], list[int]]]]:
        """Masks some words of a sample. Subclasses call this, or override it, under Megatron Core's name.

        Args:
            token_ids: `[T]` ids of the sample, special ones included.
            target_sequence_length: tokens that the sample is meant to have.
            numpy_random_state: the sample's stream of random numbers.

        Returns:
            `[T]` ids after masking, positions of masked tokens and their former ids, `[T]` 1 where a word or a special
            token begins and 0 elsewhere, and positions and former ids of each masked n-gram.
        """
        starts, words = self._words_of(token_ids)
        masked = mask_words(
            token_ids,
            words,
            target_sequence_length,
            self._rules,
            lambda: self._get_token_mask(numpy_random_state),
            numpy_random_state,
        )
        return masked.tokens, masked.positions, masked.labels, starts, masked.spans

    def _words_of(self, token_ids: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """Returns `[T]` 1 where a word or a special token begins, and the positions of the tokens of each word."""
        pieces, full_words = self._pieces, self.config.masking_do_full_word
        starts: list[int] = []
        words: list[list[int]] = []
        for position, token in enumerate(token_ids):
            is_special = token in (pieces.cls, pieces.sep)
            kind = pieces.kind_of(token)
            if kind == UNKNOWN and not is_special:
                size = len(pieces.kinds)
                raise FormatError(
                    f"{self._where}: tokens must be in the tokenizer's vocabulary, found the id {token} where ids are "
                    f"below {size}; was the file written with another tokenizer?"
                )
            continues = kind == CONTINUES and not is_special
            starts.append(0 if continues else 1)
            if is_special:
                continue
            if continues and full_words and words:
                words[-1].append(position)
            else:
                words.append([position])
        return starts, words

    def _get_token_mask(self, numpy_random_state: np.random.RandomState) -> int | None:
        """Returns what replaces a masked token; None to leave it as it is. Subclasses implement it."""
        raise NotImplementedError
