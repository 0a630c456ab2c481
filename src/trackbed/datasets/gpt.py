"""The GPT dataset: fixed-length samples from a shuffled stream of documents.

Shapes: D documents of the split, V visits to them, R samples, S tokens of a sample.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cache import (
    Allocate,
    Arrays,
    ArraySpec,
    Entry,
    Pending,
    Recipe,
    arrays_of,
    data_crc32_of,
    fingerprint,
    in_memory,
    open_entry,
    open_or_build,
    recalled,
    shape_of,
)
from trackbed.datasets import sample
from trackbed.datasets.data_checksum import DataChecksum, DatasetFingerprint
from trackbed.datasets.deferred import advice_on_missing
from trackbed.datasets.description import md5_of
from trackbed.datasets.gathering import Draws, Gatherer, Gathering
from trackbed.datasets.gpt_config import GPTDatasetConfig
from trackbed.datasets.gpt_indices import GPTIndices
from trackbed.datasets.gpt_instant import InstantSamples
from trackbed.datasets.gpt_together import MOST_VISITS, build_together
from trackbed.datasets.gpt_visits import ARRAYS, VisitArrays, VisitedSamples
from trackbed.datasets.low_level import drop_pages, identify, most_tokens, num_sequences
from trackbed.datasets.megatron import LowLevelDataset, MegatronDataset
from trackbed.datasets.sources import Layout, Stretches
from trackbed.errors import ArgumentError, FormatError, PlanError
from trackbed.index.splits import Split
from trackbed.kernels import Visits
from trackbed.tokens import IndexedDataset, IndexedGroup

__all__ = ["GPTDataset", "Piece"]

_ENTRY_COST: Final = 4e5
_VISIT_COST: Final = 18.0
_SAMPLE_COST: Final = 8.0
"""Nanoseconds an entry, a visit and a sample: files and their names, shuffle and cut, shuffle and writing."""
_SMALL_COST: Final = _ENTRY_COST + MOST_VISITS * _VISIT_COST
"""What indices that are made with others' cost at most, as far as is known without reading lengths."""
_SHAPING = (
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "create_attention_mask",
    "create_cu_seqlens",
)


@lru_cache(maxsize=64)
def _as_path(directory: str) -> Path:
    """One path for thousands of entries."""
    return Path(directory)


class Piece(NamedTuple):
    """Tokens of a sample that come from one document."""

    document: int
    """Its number in the low-level dataset."""
    start: int
    """Its first token that belongs to the sample."""
    stop: int
    """The token after the last one."""


class GPTDataset(MegatronDataset, Gathering):
    """Samples of `sequence_length` tokens, in the orders "megatron" and "balanced" megatron-core 0.16.1's, bit for bit.

    `document_index` `[V]`, `sample_index` `[R + 1, 2]` and `shuffle_index` `[R]` are mapped from the cache, and
    built first where they are not there. They are None until the first sample with `defer_npy_index_mmap`. In the
    order "instant" they do not exist.

    Args:
        indexed_dataset: the documents.
        dataset_path: their prefix, for bookkeeping.
        indexed_indices: `[D]` documents that belong to this split; None for all of them.
        num_samples: samples to give at least, or None for one epoch.
        index_split: which split this is.
        config: what decides the samples.

    Raises:
        PlanError: samples are asked for, and the split has no tokens.
        CacheError: the indices cannot be read, built or written.
    """

    config: GPTDatasetConfig
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
        super().__init__(
            indexed_dataset,
            dataset_path,
            indexed_indices,  # type: ignore[arg-type]  # None is how fast_cache_load says "all of them"
            num_samples,
            index_split,
            config,
        )
        if config.order == "instant":
            self._check_instant()
        else:
            self._keep(None if config.defer_npy_index_mmap else self._open_indices())

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Sequences in the file: a GPT dataset is split by sequence."""
        return num_sequences(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> LowLevelDataset:  # type: ignore[override]
        """Open the pair at a prefix, or the group of that name.

        Raises:
            ArgumentError: a file is missing, or `sequences_per_dataset` lacks the prefix.
            FormatError: the pair is damaged, or its tokens are no integers.
        """
        if dataset_path is None:
            msg = "a GPTDataset needs a blend, found none: give blend or blend_per_split, or use MockGPTDataset"
            raise ArgumentError(msg)
        if config.groups is not None and dataset_path in config.groups:
            group = IndexedGroup.open(dataset_path, config.groups[dataset_path], mmap=config.mmap_bin_files)
            _check_type(group)
            return group
        counts = config.sequences_per_dataset
        if counts and dataset_path not in counts:
            msg = f"sequences_per_dataset must name {dataset_path}, found {len(counts)} other prefixes"
            raise ArgumentError(msg)
        dataset = IndexedDataset(
            dataset_path,
            multimodal=False,
            mmap=config.mmap_bin_files,
            fast_cache_load=config.fast_cache_load,
            sequences_per_dataset=counts[dataset_path] if counts else None,
            dtype_code=config.token_dtype_code,
            open_when_read=True,
        )
        _check_type(dataset)
        return dataset

    def _check_instant(self) -> None:
        if self.index_split is Split.valid and not self.config.drop_last_partial_validation_sequence:
            msg = "drop_last_partial_validation_sequence must be True with order='instant', found False"
            raise ArgumentError(msg)
        if self.num_samples and not self._instant.samples_per_epoch:
            msg = (
                f"{self.dataset_path}, split {self.index_split.name}: must have tokens for one sample to give "
                f"{self.num_samples}, found {self._instant.num_tokens}"
            )
            raise PlanError(msg)

    @cached_property
    def _instant(self) -> InstantSamples:
        return InstantSamples(
            dataset=self.dataset,
            documents=self.indices,
            num_samples=self.num_samples,
            sequence_length=self.config.sequence_length,
            extra_token=int(self.config.add_extra_token_to_sequence),
            seed=self.config.random_seed,
            block=self.config.shuffle_block,
            window=self.config.shuffle_window,
        )

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the split's tokens give once, in the order "instant"."""
        return self._instant.samples_per_epoch

    def __getattr__(self, name: str) -> Any:
        """One of the indices, which the arrays may release and map again; or why there is none."""
        arrays = vars(self).get("_arrays")
        if name in ARRAYS and arrays is not None:
            return arrays[name]
        if name in ARRAYS:
            msg = (
                f"{name} needs order='megatron' or 'balanced', found 'instant', which locates samples without an index"
            )
            raise AttributeError(msg)
        return self.__getattribute__(name)  # of a property that failed this raises its own words once more

    @cached_property
    def _indices(self) -> GPTIndices:
        keep_partial = self.index_split is Split.valid and not self.config.drop_last_partial_validation_sequence
        return GPTIndices(
            dataset=self.dataset,
            documents=self.indices,
            num_samples=self.num_samples,
            sequence_length=self.config.sequence_length,
            seed=self.config.random_seed,
            extra_token=int(self.config.add_extra_token_to_sequence),
            keep_partial=keep_partial,
        )

    @cached_property
    def _decisions(self) -> dict[str, Any]:
        decisions = self._instant.decisions() if self.config.order == "instant" else self._indices.decisions()
        return {"class": type(self).__name__, **decisions, "data": identify(self.dataset)}

    @cached_property
    def _decided(self) -> str:
        """SHA-256 of what decides the indices."""
        return fingerprint(self._decisions)

    @property
    def fingerprint(self) -> DatasetFingerprint:
        """SHA-256 of what decides the samples: files by their identity, configuration and order."""
        return DatasetFingerprint.of(self._fingerprint, self)

    @cached_property
    def _fingerprint(self) -> str:
        shaping = [getattr(self.config, name) for name in _SHAPING]
        return fingerprint({"all": [self._decided, md5_of(self.unique_description), self._pad_token_id, *shaping]})

    @cached_property
    def data_checksum(self) -> DataChecksum:
        """CRC-32 of the tokens in each document of the split: files of the same identity may have others."""
        return DataChecksum(self._checksum_data)

    def _checksum_data(self) -> str:
        if self.config.order == "instant":
            return self._instant.checksum()
        found = "" if self._arrays is None else data_crc32_of(self._arrays)
        return found or self._indices.checksum

    @property
    def content_key(self) -> str:
        """Text that is the same for two datasets if and only if their `content` is."""
        return f"{super().content_key} {self._decided}"

    def content(self) -> dict[str, Any]:
        """What decides the samples, by name; see `MegatronDataset.content`."""
        return {"data": self._decisions["data"], **super().content(), **self._decisions}

    def _entry(self) -> Entry | None:
        """Where the indices are kept; None where they are not."""
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
            known_fingerprint=self._decided,
            data=self._indices if self._indices.stamps else None,
        )

    def _open_indices(self) -> Arrays:
        arrays = recalled()
        if arrays is not None:
            return arrays
        entry = self._entry()
        if entry is None:
            return self._build_indices(in_memory)
        cost = self._cost
        is_indexed = isinstance(self.dataset, IndexedDataset)
        is_small = cost <= _SMALL_COST and is_indexed
        return open_or_build(
            entry,
            expected=self._expect_indices,
            build=self._build_indices,
            cost=cost,
            recipe=Recipe(build_together, self._indices) if is_small else None,
            read_ahead=self._indices.read_ahead if is_indexed and not is_small else None,
        )

    def _build_indices(self, allocate: Allocate) -> Arrays:
        with self._named_errors():
            arrays = self._indices.build(allocate)
        drop_pages(self.dataset)  # of thousands, most are not read for a long time
        return arrays

    def _expect_indices(self) -> Mapping[str, ArraySpec]:
        with self._named_errors():
            return self._indices.expected()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Say in which dataset something is wrong."""
        try:
            yield
        except (PlanError, FormatError) as error:
            msg = f"{self.dataset_path}, split {self.index_split.name}: {error}"
            raise type(error)(msg) from error

    @property
    def _cost(self) -> float:
        """Nanoseconds that the indices take to build, roughly, from what is known without reading lengths."""
        room, documents = most_tokens(self.dataset), num_sequences(self.dataset) or 1
        visits = documents if self.indices is None else len(self.indices)
        tokens = (room or 0) * visits / documents
        epochs = max(1.0, (self.num_samples or 0) * self.config.sequence_length / tokens) if tokens else 1.0
        return _ENTRY_COST + epochs * (visits * _VISIT_COST + tokens / self.config.sequence_length * _SAMPLE_COST)

    def _keep(self, arrays: Arrays | None) -> None:
        """Take the indices, each of which is mapped when it is first asked for; or None until a sample is."""
        self._arrays = arrays
        if arrays is None:
            vars(self).update(dict.fromkeys(ARRAYS))
        else:
            for name in ARRAYS:
                vars(self).pop(name, None)

    def __getstate__(self) -> dict[str, Any]:
        """What a worker process needs: indices that lie in the cache are opened there again."""
        state = vars(self).copy()
        for name in ("_indices", "_instant", "_gatherer", "_visited", "data_checksum"):
            state.pop(name, None)
        if self.config.order != "instant" and self._entry() is not None:
            state.update(dict.fromkeys(("_arrays", *ARRAYS)))
        return state

    def __len__(self) -> int:
        """R, samples in the dataset: at least as many as were asked for."""
        if self.config.order == "instant":
            return len(self._instant)
        if self._arrays is None:
            return self._indices.plan.num_samples
        return shape_of(self._arrays, "sample_index")[0] - 1

    def can_give(self, num_samples: int) -> bool:
        """Whether there are so many samples. Indices that are still to be built are not needed to tell."""
        arrays = vars(self).get("_arrays")
        counts_itself = type(self).__len__ is not GPTDataset.__len__
        if isinstance(arrays, Pending) and not arrays.is_open and not counts_itself:
            if num_samples <= (self.num_samples or 0) and not self._indices.keep_partial:
                return True
            with self._named_errors():  # partial samples are counted in single precision, which may fall short
                return num_samples <= self._indices.plan.num_samples
        return num_samples <= len(self)

    def __getitem__(self, idx: int | None) -> dict[str, Any]:
        """One sample: `tokens`, `labels`, `loss_mask`, `position_ids`, and what the configuration adds.

        Args:
            idx: position in the shuffled order, in `[-R, R)`; None gives sample 0 with a loss mask of zeros.

        Raises:
            IndexError: there is no such sample.
            CacheError: an index is damaged.
            FormatError: the files are shorter than their index says.
        """
        position = 0 if idx is None else idx
        text, _ = self._query_document_sample_shuffle_indices(position)
        text = np.require(text, dtype=np.int64, requirements=["C", "W"])  # whatever a subclass made of it
        # As in Megatron Core, samples share mask and positions where no option shapes them.
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
            ids[ids == pad] = 0  # so that an embedding can look it up; the loss mask has taken note
        for name in ("tokens", "labels", "loss_mask"):
            found[name] = torch.from_numpy(found[name])
        if config.create_cu_seqlens:
            pieces = self._piece_lengths(position)
            found["cu_seqlens"], found["max_seqlen"] = sample.document_borders(pieces, config.sequence_length)
        return found

    @property
    def causal_mask(self) -> torch.Tensor:
        """`[1, S, S]`, one for all samples."""
        return sample.shared_mask(self.config.sequence_length)

    @property
    def _positions(self) -> torch.Tensor:
        """`[S]`, one for all samples."""
        return sample.shared_positions(self.config.sequence_length)

    @property
    def padding(self) -> int:
        """Id that fills up short samples, and is no label: the tokenizer's, or -1."""
        return self._pad_token_id

    @classmethod
    def makes_its_samples(cls) -> bool:
        """Whether this is a subclass that changes what a sample holds, so that each must be asked for."""
        hooks = ("__getitem__", "_query_document_sample_shuffle_indices")
        return any(getattr(cls, name) is not getattr(GPTDataset, name) for name in hooks)

    def layout(self) -> Layout | None:
        """How its samples lie in its files; None where a subclass makes them."""
        if self.makes_its_samples():
            return None
        if self.config.order == "instant" and self._instant.repeats:
            return self._instant.repeated
        if self.config.order == "instant":
            return Stretches(self._instant.samples_per_epoch, self._instant.origin_byte)
        self._open_deferred()
        return Visits(self.document_index, self.sample_index, self.shuffle_index, self._indices.keep_partial)

    @cached_property
    def _gatherer(self) -> Gatherer:
        return Gatherer([self], None)

    def _gathered(self) -> Gatherer | None:
        return None if self.makes_its_samples() else self._gatherer

    def _draw(self, positions: npt.NDArray[np.int64]) -> Draws:
        if self.config.order == "instant" and len(positions):
            return self._instant.ahead.locate(positions)
        return np.zeros(len(positions), dtype=np.int32), positions

    def _open_deferred(self) -> None:
        """See that the indices are there."""
        if self.shuffle_index is None:
            entry = self._entry()
            self._keep(
                self._indices.build(in_memory)
                if entry is None
                else open_entry(entry, expected=self._expect_indices, advice=advice_on_missing(self.config))
            )

    @cached_property
    def _visited(self) -> VisitedSamples:
        """Samples as indices say."""
        return VisitedSamples(
            self.dataset,
            length=self.config.sequence_length + self.config.add_extra_token_to_sequence,
            extra_token=int(self.config.add_extra_token_to_sequence),
            may_be_short=self._indices.keep_partial,
        )

    @property
    def _visit_arrays(self) -> VisitArrays:
        """The indices, which are opened first where that was put off; or what somebody has put in their place."""
        own = vars(self)
        if not own.keys().isdisjoint(ARRAYS):
            self._open_deferred()
            return VisitArrays(self.document_index, self.sample_index, self.shuffle_index, self._arrays or {})
        arrays = own["_arrays"]
        documents, rows, shuffle = arrays_of(arrays, ARRAYS)
        return VisitArrays(documents, rows, shuffle, arrays)

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """`[S + X]` token ids of a sample, filled up with padding, and the documents that they come from.

        Subclasses override this, under Megatron Core's name, to change the text of a sample.
        """
        if self.config.order == "instant":
            return self._instant.read(idx)
        return self._visited.read(self._visit_arrays, idx, padding=self._pad_token_id)

    def pieces(self, idx: int) -> list[Piece]:
        """Where the text of a sample comes from, in its order, the extra token included and padding not.

        What a subclass makes of the text is not known here.

        Args:
            idx: position in the shuffled order, in `[-R, R)`.

        Raises:
            IndexError: there is no such sample.
        """
        found = (
            self._instant.pieces(idx)
            if self.config.order == "instant"
            else zip(*self._visited.pieces(self._visit_arrays, idx), strict=True)
        )
        return [Piece(*one) for one in found if one[1] < one[2]]

    def _piece_lengths(self, idx: int) -> list[int]:
        """Tokens that a sample takes from each of the visits it spans, the extra one included."""
        if self.config.order == "instant":
            return self._instant.piece_lengths(idx)
        _, starts, stops = self._visited.pieces(self._visit_arrays, idx)
        return [stop - start for start, stop in zip(starts, stops, strict=True)]


def _check_type(dataset: IndexedDataset | IndexedGroup) -> None:
    """Refuse numbers that are no token ids."""
    dtype = np.dtype(dataset.index.dtype)
    if dtype.kind not in "iu":
        msg = f"{dataset.path_prefix}: tokens of a GPT dataset must be integers, found {dtype}"
        raise FormatError(msg)
