"""The GPT dataset: fixed-length samples from a shuffled stream of documents.

Shapes: D documents of the split, V visits to them, R samples, S tokens of a sample.
"""

from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cache import Entry, Request, fingerprint
from trackbed.datasets import sample
from trackbed.datasets.data_checksum import DataChecksum, DatasetFingerprint
from trackbed.datasets.gathering import Gatherer, Gathering
from trackbed.datasets.gpt_config import GPTDatasetConfig
from trackbed.datasets.gpt_indexed import IndexedSamples
from trackbed.datasets.gpt_indices import GPTIndices
from trackbed.datasets.gpt_instant import InstantSamples
from trackbed.datasets.gpt_kind import GPT_KIND
from trackbed.datasets.gpt_visits import ARRAYS
from trackbed.datasets.index_arrays import IndexArray, IndexArrays
from trackbed.datasets.indexed import IndexedDataset
from trackbed.datasets.low_level import has_stamps, identify, num_sequences
from trackbed.datasets.megatron import LowLevelDataset, MegatronDataset
from trackbed.datasets.overrides import check_overrides
from trackbed.datasets.samples import SampleLocations, SamplePieces, Samples
from trackbed.datasets.sources import SampleLayout
from trackbed.datasets.start import current_start
from trackbed.errors import ArgumentError, FormatError
from trackbed.index.splits import Split
from trackbed.tokens import IndexedGroup

__all__ = ["GPTDataset", "Piece"]

_SHAPING = (
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "create_attention_mask",
    "create_cu_seqlens",
)


@lru_cache(maxsize=64)
def _as_path(directory: str) -> Path:
    """Returns the path of a folder, as one object for thousands of entries."""
    return Path(directory)


class Piece(NamedTuple):
    """Consecutive tokens of a sample that come from one document."""

    document: int
    """Number of the document in the low-level dataset."""
    start: int
    """First token of the document that belongs to the sample."""
    stop: int
    """One after the last token that belongs to the sample."""


class GPTDataset(MegatronDataset, Gathering):
    """Samples of `sequence_length` tokens, cut from a shuffled stream of documents.

    In the orders "megatron" and "balanced" they equal those of megatron-core 0.16.1, bit for bit.

    `document_index` `[V]`, `sample_index` `[R + 1, 2]` and `shuffle_index` `[R]` are mapped from the cache, and built
    first if they are missing. With `defer_npy_index_mmap` they are None until a sample is read. In the order "instant"
    they do not exist.

    Args:
        indexed_dataset: the documents.
        dataset_path: their prefix, for descriptions and errors.
        indexed_indices: `[D]` documents that belong to this split; None for all of them.
        num_samples: lowest number of samples, or None for one epoch.
        index_split: the split.
        config: configuration of the samples.

    Raises:
        PlanError: samples are requested, and the split has no tokens.
        CacheError: the indices cannot be read, built or written.
    """

    config: GPTDatasetConfig
    document_index = IndexArray()
    sample_index = IndexArray()
    shuffle_index = IndexArray()
    _samples: Samples
    _indices: GPTIndices
    """Inputs of the indices; not set in the order "instant"."""
    _ORDERS: ClassVar[tuple[str, ...]] = ("megatron", "balanced", "instant")

    def __init__(
        self,
        indexed_dataset: LowLevelDataset,
        dataset_path: str | None,
        indexed_indices: npt.NDArray[np.integer[Any]] | None,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        check_overrides(
            type(self),
            "_get_num_epochs",
            "_get_num_tokens_per_epoch",
            advice="override _build_document_sample_shuffle_indices",
        )
        super().__init__(
            indexed_dataset,
            dataset_path,
            indexed_indices,  # type: ignore[arg-type]  # None is how fast_cache_load says "all of them"
            num_samples,
            index_split,
            config,
        )
        self._samples = self._instant_samples() if config.order == "instant" else self._indexed_samples()
        if self.builds_its_indices():
            self._take_indices()
        elif self._index.is_missing and not config.defer_npy_index_mmap:
            self._index.open(self._request(), self._indices.build)

    @classmethod
    def builds_its_indices(cls) -> bool:
        """True for a subclass that overrides `_build_document_sample_shuffle_indices`."""
        hook = cls._build_document_sample_shuffle_indices
        return hook is not GPTDataset._build_document_sample_shuffle_indices

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Returns the number of sequences in the file: a GPT dataset is split by sequence."""
        return num_sequences(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> LowLevelDataset:  # type: ignore[override]
        """Opens the pair at a prefix, or the group of pairs that `groups` lists for it.

        Raises:
            ArgumentError: a file is missing, or `sequences_per_dataset` lacks the prefix.
            FormatError: the pair is damaged, or its tokens are not integers.
        """
        if dataset_path is None:
            msg = "a GPTDataset needs a blend, found none: give blend or blend_per_split, or use MockGPTDataset"
            raise ArgumentError(msg)
        if config.groups is not None and dataset_path in config.groups:
            group = IndexedGroup.open(
                dataset_path, config.groups[dataset_path], mmap=config.mmap_bin_files, pair_class=IndexedDataset
            )
            _check_type(group)
            return group
        counts = config.sequences_per_dataset
        if counts and dataset_path not in counts:
            msg = f"sequences_per_dataset must name {dataset_path}, found {len(counts)} other prefixes"
            raise ArgumentError(msg)
        start = current_start()
        dataset = IndexedDataset(
            dataset_path,
            multimodal=False,
            mmap=config.mmap_bin_files,
            fast_cache_load=config.fast_cache_load,
            sequences_per_dataset=counts[dataset_path] if counts else None,
            dtype_code=config.token_dtype_code,
            open_when_read=True,
            header=None if start is None else start.header(dataset_path),
        )
        _check_type(dataset)
        return dataset

    def _build_document_sample_shuffle_indices(
        self,
    ) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]]]:
        """Returns `document_index`, `sample_index` and `shuffle_index`, which are built first if they are missing.

        Subclasses override this, under Megatron Core's name, to change the order of the samples. It is called when the
        dataset is constructed, on one rank of each cache before the others.
        """
        if self._index.is_missing:
            self._index.open(self._request(), self._indices.build)
        documents, rows, shuffle = self._index.several()
        return documents, rows, shuffle

    def _take_indices(self) -> None:
        """Takes the indices of a subclass that builds its own."""
        if self.config.order == "instant":
            msg = (
                f"{type(self).__name__}._build_document_sample_shuffle_indices needs order='megatron' or 'balanced', "
                "found 'instant', which has no indices"
            )
            raise ArgumentError(msg)
        documents, rows, shuffle = map(np.ascontiguousarray, self._build_document_sample_shuffle_indices())
        self.document_index = documents
        self.sample_index = rows
        self.shuffle_index = shuffle

    def _instant_samples(self) -> InstantSamples:
        config = self.config
        if self.index_split is Split.valid and not config.drop_last_partial_validation_sequence:
            msg = "drop_last_partial_validation_sequence must be True with order='instant', found False"
            raise ArgumentError(msg)
        return InstantSamples(
            dataset=self.dataset,
            documents=self.indices,
            num_samples=self.num_samples,
            sequence_length=config.sequence_length,
            extra_token=int(config.add_extra_token_to_sequence),
            seed=config.random_seed,
            block=config.shuffle_block,
            window=config.shuffle_window,
            where=self._where,
        )

    def _indexed_samples(self) -> IndexedSamples:
        config = self.config
        self._indices = GPTIndices(
            dataset=self.dataset,
            documents=self.indices,
            num_samples=self.num_samples,
            sequence_length=config.sequence_length,
            seed=config.random_seed,
            extra_token=int(config.add_extra_token_to_sequence),
            keep_partial=self.index_split is Split.valid and not config.drop_last_partial_validation_sequence,
            where=self._where,
        )
        return IndexedSamples(self._indices)

    @property
    def _where(self) -> str:
        """Name of the dataset and its split, for errors."""
        return f"{self.dataset_path}, split {self.index_split.name}"

    @property
    def _index(self) -> IndexArrays:
        return self._samples.index

    @property
    def _opened(self) -> Samples:
        """The samples; opens their index first if that was deferred."""
        samples = self._samples
        if samples.index.is_missing:
            samples.index.open_late(self._request(), self._indices.build, self.config)
        return samples

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one epoch of the split."""
        return self._samples.samples_per_epoch

    @cached_property
    def _decisions(self) -> dict[str, Any]:
        return {"class": type(self).__name__, **self._samples.decisions(), "data": identify(self.dataset)}

    @cached_property
    def _index_fingerprint(self) -> str:
        """SHA-256 of everything that decides the indices."""
        return fingerprint(self._decisions)

    @property
    def fingerprint(self) -> DatasetFingerprint:
        """SHA-256 of everything that decides the samples: file identities, configuration and order."""
        return DatasetFingerprint.of(self._fingerprint, self)

    @cached_property
    def _fingerprint(self) -> str:
        shaping = [getattr(self.config, name) for name in _SHAPING]
        return fingerprint(
            {"all": [self._index_fingerprint, self.unique_description_hash, self._pad_token_id, *shaping]}
        )

    @cached_property
    def data_checksum(self) -> DataChecksum:
        """CRC-32 of the document lengths of the split, which files of the same identity may differ in."""
        return DataChecksum(self._samples.checksum)

    @property
    def content_key(self) -> str:
        """Text that is equal for two datasets if and only if their `content` is."""
        return f"{super().content_key} {self._index_fingerprint}"

    def content(self) -> dict[str, Any]:
        """Returns everything that decides the samples, by name; see `MegatronDataset.content`."""
        return {"data": self._decisions["data"], **super().content(), **self._decisions}

    def _entry(self) -> Entry | None:
        """Returns the cache entry of the indices; None if they are kept in memory."""
        directory = self.config.path_to_cache
        if directory is None and not self.config.mock:
            directory = f"{self.dataset.path_prefix}/cache/{type(self).__name__}_indices"
        if directory is None:
            return None
        return Entry(
            directory=_as_path(str(directory)),
            stem=f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}",
            description=self.unique_description,
            arrays=ARRAYS,
            decisions=self._decisions,
            known_fingerprint=self._index_fingerprint,
            data=self._indices if has_stamps(self.dataset) else None,
        )

    def _request(self) -> Request | None:
        """Returns the request for the indices, or None if they are kept in memory."""
        entry = self._entry()
        return None if entry is None else Request(entry, GPT_KIND, self._indices)

    def __getstate__(self) -> dict[str, Any]:
        """State without the gatherer and the checksum, which a copy computes again."""
        state = vars(self).copy()
        for name in ("_gatherer", "data_checksum"):
            state.pop(name, None)
        state["_samples"] = copy(self._samples)  # its index arrays may be replaced
        return state

    def __len__(self) -> int:
        """R, samples in the dataset: at least as many as were requested."""
        return len(self._samples)

    def can_give(self, num_samples: int) -> bool:
        """True if there are at least `num_samples` samples. Does not need indices that are not built yet."""
        if type(self).__len__ is not GPTDataset.__len__:
            return num_samples <= len(self)
        return self._samples.can_give(num_samples)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """Returns one sample: `tokens`, `labels`, `loss_mask`, `position_ids`, and keys that the configuration adds.

        Args:
            idx: position in the shuffled order, in `[-R, R)`; None for sample 0 with a loss mask of zeros.
                A blend in the order "instant" passes a `StoredSample`, the number of a sample in the file, which a
                subclass must pass on unchanged.

        Raises:
            IndexError: `idx` is out of range.
            CacheError: an index is damaged.
            FormatError: the files are shorter than their index says.
        """
        position = 0 if idx is None else idx
        text, _ = self._query_document_sample_shuffle_indices(position)
        text = np.require(text, dtype=np.int64, requirements=["C", "W"])  # a subclass may return any array-like
        # As in Megatron Core, samples share mask and positions if no option changes them.
        shared = not (self.config.reset_position_ids or self.config.reset_attention_mask or self.config.eod_mask_loss)
        config, pad, eod = self.config, self._pad_token_id, self.config.tokenizer.eod  # type: ignore[union-attr]
        tokens, labels = sample.tokens_and_labels(text, extra_token=config.add_extra_token_to_sequence, pad=pad)
        found: dict[str, Any] = {"tokens": tokens, "labels": labels}
        if config.create_attention_mask:
            mask = self.causal_mask if shared else self.causal_mask.clone()
            found["attention_mask"] = (
                sample.cut_at_documents(mask, tokens, eod=eod) if config.reset_attention_mask else mask
            )
        masked_input = eod if config.eod_mask_loss else None
        loss_mask = sample.loss_mask(tokens, labels, pad=pad, masked_input=masked_input)
        found["loss_mask"] = np.zeros_like(loss_mask) if idx is None else loss_mask
        found["position_ids"] = (
            torch.from_numpy(sample.positions_in_documents(tokens, eod=eod))
            if config.reset_position_ids
            else (self._positions if shared else self._positions.clone())
        )
        for ids in (tokens, labels):
            ids[ids == pad] = 0  # a valid id for the embedding lookup; the loss mask is computed already
        for name in ("tokens", "labels", "loss_mask"):
            found[name] = torch.from_numpy(found[name])
        if config.create_cu_seqlens:
            pieces = self._opened.pieces(position)
            lengths = [stop - start for start, stop in zip(pieces.starts, pieces.stops, strict=True)]
            found["cu_seqlens"], found["max_seqlen"] = sample.document_borders(lengths, config.sequence_length)
        return found

    @property
    def causal_mask(self) -> torch.Tensor:
        """`[1, S, S]` causal mask, shared by all samples."""
        return sample.shared_mask(self.config.sequence_length)

    @property
    def _positions(self) -> torch.Tensor:
        """`[S]` positions, shared by all samples."""
        return sample.shared_positions(self.config.sequence_length)

    @property
    def padding(self) -> int:
        """Id that pads short samples and is masked out as a label: the tokenizer's, or -1."""
        return self._pad_token_id

    @classmethod
    def makes_its_samples(cls) -> bool:
        """True for a subclass that overrides how samples are made, so that batches call it for each sample."""
        hooks = ("__getitem__", "_query_document_sample_shuffle_indices")
        return any(getattr(cls, name) is not getattr(GPTDataset, name) for name in hooks)

    def layout(self) -> SampleLayout | None:
        """Returns the layout of the samples in their files; None if a subclass makes them."""
        return None if self.makes_its_samples() else self._opened.layout()

    @cached_property
    def _gatherer(self) -> Gatherer:
        return Gatherer([self], None)

    def _gathered(self) -> Gatherer | None:
        return None if self.makes_its_samples() else self._gatherer

    def _draw(self, positions: npt.NDArray[np.int64]) -> SampleLocations:
        return self._samples.locate(positions)

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns `[S + X]` token ids of a sample, padded if short, and the documents that they come from.

        Subclasses override this, under Megatron Core's name, to change the text of a sample.
        """
        return self._opened.read(idx, padding=self._pad_token_id)

    def pieces(self, idx: int) -> list[Piece]:
        """Returns the pieces that a sample is cut from, in order, the extra token included and padding excluded.

        Changes that a subclass makes to the text are not reflected.

        Args:
            idx: position in the shuffled order, in `[-R, R)`.

        Raises:
            IndexError: `idx` is out of range.
            CacheError: an index is damaged.
        """
        found: SamplePieces = self._opened.pieces(idx)
        return [Piece(*one) for one in zip(*found, strict=True) if one[1] < one[2]]


def _check_type(dataset: IndexedDataset | IndexedGroup) -> None:
    """Raises FormatError unless the tokens are integers."""
    dtype = np.dtype(dataset.index.dtype)
    if dtype.kind not in "iu":
        msg = f"{dataset.path_prefix}: tokens of a GPT dataset must be integers, found {dtype}"
        raise FormatError(msg)
