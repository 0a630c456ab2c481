"""The GPT dataset: fixed-length samples from a shuffled stream of documents.

Shapes: D documents of the split, V visits to them, R samples, S tokens of a sample.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cache import Kind
from trackbed.datasets.batches.forms import GPTForm, PackedForm
from trackbed.datasets.batches.reader import BatchForm
from trackbed.datasets.batches.sources import SampleLayout
from trackbed.datasets.cached import CachedDataset, check_overrides
from trackbed.datasets.config import COMPUTED, ORDERS
from trackbed.datasets.gpt import pack, sample
from trackbed.datasets.gpt.config import GPTDatasetConfig
from trackbed.datasets.gpt.indexed import IndexedSamples
from trackbed.datasets.gpt.indices import GPT_KIND, GPTIndices
from trackbed.datasets.gpt.instant import InstantSamples
from trackbed.datasets.gpt.packed import PackedSamples
from trackbed.datasets.low_level import num_sequences, open_group, open_pair
from trackbed.datasets.megatron_dataset import LowLevelDataset
from trackbed.datasets.samples import IndexArray, IndexArrays, SampleLocations, SamplePieces, Samples
from trackbed.errors import ArgumentError
from trackbed.index.splits import Split

# Fingerprints have a place for create_attention_mask, which does not change the data: it is True there.
_SHAPING = (
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "create_attention_mask",
    "create_cu_seqlens",
)


class Piece(NamedTuple):
    """Consecutive tokens of a sample that come from one document."""

    document: int
    """Number of the document in the low-level dataset."""
    start: int
    """First token of the document that belongs to the sample."""
    stop: int
    """One after the last token that belongs to the sample."""


class GPTDataset(CachedDataset):
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
    _ORDERS: ClassVar[tuple[str, ...]] = ORDERS
    _KIND: ClassVar[Kind] = GPT_KIND
    _INDEX_HOOK: ClassVar[str] = "_build_document_sample_shuffle_indices"
    _SAMPLE_HOOKS: ClassVar[tuple[str, ...]] = ("__getitem__", "_query_document_sample_shuffle_indices")

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
        makers: dict[str, Callable[[], Samples]] = {"instant": self._instant_samples, "packed": self._packed_samples}
        self._samples = makers.get(config.order, self._indexed_samples)()
        if self.builds_its_indices():
            self._take_indices()
        elif self._index.is_missing and not config.defer_npy_index_mmap:
            self._index.open(self._request(), self._indices.build)

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
            raise ArgumentError(
                "a GPTDataset needs a blend, found none: give blend or blend_per_split, or use MockGPTDataset"
            )
        group = open_group(dataset_path, config)
        if group is not None:
            return group
        counts = config.sequences_per_dataset
        if counts and dataset_path not in counts:
            raise ArgumentError(f"sequences_per_dataset must name {dataset_path}, found {len(counts)} other prefixes")
        return open_pair(
            dataset_path,
            config,
            fast_cache_load=config.fast_cache_load,
            sequences_per_dataset=counts[dataset_path] if counts else None,
            dtype_code=config.token_dtype_code,
        )

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
        if self.config.order in COMPUTED:
            raise ArgumentError(
                f"{type(self).__name__}._build_document_sample_shuffle_indices needs order='megatron' or 'balanced', "
                f"found {self.config.order!r}, which has no indices"
            )
        documents, rows, shuffle = map(np.ascontiguousarray, self._build_document_sample_shuffle_indices())
        self.document_index = documents
        self.sample_index = rows
        self.shuffle_index = shuffle

    def _instant_samples(self) -> InstantSamples:
        config = self.config
        if self.index_split is Split.valid and not config.drop_last_partial_validation_sequence:
            raise ArgumentError("drop_last_partial_validation_sequence must be True with order='instant', found False")
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

    def _packed_samples(self) -> PackedSamples:
        config = self.config
        return PackedSamples(
            dataset=self.dataset,
            documents=self.indices,
            num_samples=self.num_samples,
            shape=config.pack_shape,
            most_documents=config.pack_most_documents,
            pack_window=config.pack_window,
            is_contiguous=self.dataset_path in (config.pack_contiguous or ()),
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

    def _ingredients(self) -> GPTIndices:
        return self._indices

    def _index_decisions(self) -> dict[str, Any]:
        return self._samples.decisions()

    def _shaping(self) -> dict[str, Any]:
        if self.config.order == "packed":  # none of them has an effect
            return {}
        values = {name: getattr(self.config, name) for name in _SHAPING}
        # Newer options are left out where they are not used, so that fingerprints stay what they were.
        newer = {name: True for name in ("inter_document_masking", "mask_borders") if getattr(self.config, name)}
        return {**values, "create_attention_mask": True, **newer}

    def _agreed_besides(self) -> dict[str, Any]:
        try:
            eod = self.config.tokenizer.eod  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001  tokenizers without such a token raise various errors
            eod = None
        return {"eod": int(eod) if isinstance(eod, (int, np.integer)) else None}

    def sample_fields(self) -> dict[str, Any] | None:
        """Returns everything but the tokens that decides the samples; see `CachedDataset.sample_fields`."""
        fields = super().sample_fields()
        if fields is not None:
            fields.pop("create_attention_mask", None)
        return fields

    def _checksum(self) -> str:
        return self._samples.checksum()

    @property
    def _stem(self) -> str:
        return f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"

    def __getstate__(self) -> dict[str, Any]:
        """State without what a copy computes again."""
        return {**super().__getstate__(), "_samples": copy(self._samples)}  # its index arrays may be replaced

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
        if isinstance(self._samples, PackedSamples):
            return self._pack(self._samples, position, is_trained=idx is not None)
        text, *_ = self._query_document_sample_shuffle_indices(position)
        text = np.require(text, dtype=np.int64, requirements=["C", "W"])  # a subclass may return any array-like
        # As in Megatron Core, samples share mask and positions if no option changes them.
        shared = not (self.config.reset_position_ids or self.config.reset_attention_mask or self.config.eod_mask_loss)
        config, pad, eod = self.config, self._pad_token_id, self.config.tokenizer.eod  # type: ignore[union-attr]
        tokens, labels = sample.tokens_and_labels(text, extra_token=config.add_extra_token_to_sequence, pad=pad)
        item: dict[str, Any] = {"tokens": tokens, "labels": labels}
        if config.create_attention_mask and not config.inter_document_masking:
            mask = self.causal_mask if shared else self.causal_mask.clone()
            item["attention_mask"] = (
                sample.cut_at_documents(mask, tokens, eod=eod) if config.reset_attention_mask else mask
            )
        masked_input = eod if config.eod_mask_loss else None
        loss_mask = sample.loss_mask(tokens, labels, pad=pad, masked_input=masked_input)
        if config.mask_borders:
            loss_mask[sample.labels_of_other_documents(self._piece_lengths(position), len(loss_mask))] = 0.0
        item["loss_mask"] = np.zeros_like(loss_mask) if idx is None else loss_mask
        item["position_ids"] = (
            torch.from_numpy(sample.positions_in_documents(tokens, eod=eod))
            if config.reset_position_ids
            else (self._positions if shared else self._positions.clone())
        )
        for ids in (tokens, labels):
            ids[ids == pad] = 0  # a valid id for the embedding lookup; the loss mask is computed already
        for name in ("tokens", "labels", "loss_mask"):
            item[name] = torch.from_numpy(item[name])
        if config.create_cu_seqlens or config.inter_document_masking:
            item["cu_seqlens"], item["max_seqlen"] = self._borders(position)
        if config.inter_document_masking:
            item["position_ids"] = sample.positions_between(item["cu_seqlens"])
        return item

    def _pack(self, samples: PackedSamples, position: int, *, is_trained: bool) -> dict[str, Any]:
        """Returns the tensors of a pack."""
        found = samples.pieces(position)
        texts = [
            np.asarray(self.dataset.get(document, offset=start, length=stop - start), dtype=np.int64)
            for document, start, stop in zip(*found, strict=True)
        ]
        shape = {"length": samples.shape.sequence_length, "multiple": samples.shape.multiple}
        trained = [samples.trained_labels(*one) for one in zip(*found, strict=True)]
        if not is_trained:
            trained = [np.zeros_like(one) for one in trained]  # sample 0 of a request for none
        item: dict[str, Any] = {**pack.tensors(texts, trained, **shape), **pack.borders(texts, **shape)}
        item["max_seqlen"] = pack.longest(texts, multiple=samples.shape.multiple)
        item |= pack.counts(trained, num_borders=len(item["cu_seqlens"]))
        return {name: torch.as_tensor(one) for name, one in item.items()}

    def _borders(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `cu_seqlens` and `max_seqlen` of a sample."""
        config, lengths = self.config, self._piece_lengths(position)
        if config.inter_document_masking and config.order != "instant":
            extra_token = config.add_extra_token_to_sequence
            return sample.borders_of_pieces(lengths, config.sequence_length, extra_token=extra_token)
        return sample.document_borders(lengths, config.sequence_length)

    @property
    def opened_samples(self) -> Samples:
        """How the samples are cut from the files; opens the index first if that was deferred."""
        return self._opened

    def _piece_lengths(self, position: int) -> list[int]:
        """Returns the tokens of each document in a sample, the extra token included."""
        pieces = self._opened.pieces(position)
        return [stop - start for start, stop in zip(pieces.starts, pieces.stops, strict=True)]

    @property
    def causal_mask(self) -> torch.Tensor:
        """`[1, S, S]` causal mask, shared by all samples."""
        return sample.shared_mask(self.config.sequence_length)

    @property
    def _positions(self) -> torch.Tensor:
        """`[S]` positions, shared by all samples."""
        return sample.shared_positions(self.config.sequence_length)

    def layout(self) -> SampleLayout | None:
        """Returns the layout of the samples in their files; None if a subclass makes them."""
        return None if self.makes_its_samples() else self._opened.layout()

    def batch_form(self, members: Sequence["GPTDataset"], dataset_id: torch.dtype | None) -> BatchForm:
        """Returns the form of batches of such samples; see `CachedDataset.batch_form`."""
        if self.config.order == "packed":
            packs = [one.opened_samples for one in members]
            return PackedForm(packs, self.config, dataset_id=dataset_id)  # type: ignore[arg-type]  # all PackedSamples
        return GPTForm(self.config, pad=self.padding, dataset_id=dataset_id)

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
