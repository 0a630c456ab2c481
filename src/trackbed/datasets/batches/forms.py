"""Forms of batches of GPT samples, of packs and of masked samples: their tensors, and the kernels that fill them.

Shapes: B samples of a batch, S tokens of a sample.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trackbed.datasets.batches.context import WHOLE, Context
from trackbed.datasets.batches.reader import BatchForm
from trackbed.datasets.gpt import sample
from trackbed.datasets.gpt.config import GPTDatasetConfig
from trackbed.datasets.gpt.packed import PackedSamples
from trackbed.index.packing import find_by_group
from trackbed.kernels import (
    BatchArrays,
    FetchedBytes,
    Gathered,
    MaskedBatchArrays,
    MaskingTable,
    PackedBatchArrays,
    PackedShape,
    SampleShape,
    SampleSources,
    gather,
    gather_masked,
    gather_packs,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSpec:
    """Specification of the tensors in the batches of a GPT dataset. See `BatchSpec`."""

    length: int
    """S."""
    dataset_id: torch.dtype | None
    """Dtype of the dataset's number in a blend; None without a blend."""
    has_mask: bool
    """True if samples have an attention mask."""
    shares_mask: bool
    """True if all samples have the same attention mask."""
    has_borders: bool
    """True if samples have `cu_seqlens` and `max_seqlen`."""

    def tensors(self, size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of each tensor of a batch of B samples, in the order of a sample's keys."""
        ids = (torch.int64, (size, self.length))
        entries = {
            "dataset_id": (self.dataset_id, (size,)),
            "tokens": ids,
            "labels": ids,
            "attention_mask": (torch.bool if self.has_mask else None, (size, 1, self.length, self.length)),
            "loss_mask": (torch.float32, (size, self.length)),
            "position_ids": ids,
            "cu_seqlens": (torch.int32 if self.has_borders else None, (size, self.length + 1)),
            "max_seqlen": (torch.int32 if self.has_borders else None, (size,)),
        }
        return {name: (dtype, shape) for name, (dtype, shape) in entries.items() if dtype is not None}

    def memory(self, size: int, arrays: dict[str, npt.NDArray[Any]]) -> BatchArrays:
        """Returns the memory of a batch as the kernel takes it."""
        if "attention_mask" in arrays:
            arrays["attention_mask"] = arrays["attention_mask"].reshape(size, self.length, self.length)
        return BatchArrays(arrays)


class GPTForm(BatchForm):
    """Form of the batches of GPT datasets of one configuration.

    Args:
        config: their configuration.
        pad: the padding id.
        dataset_id: dtype of the dataset's number in a batch, or None to leave it out.
    """

    spec: GPTSpec

    def __init__(self, config: GPTDatasetConfig, *, pad: int, dataset_id: torch.dtype | None) -> None:
        eod = config.tokenizer.eod  # type: ignore[union-attr]
        has_eod = isinstance(eod, (int, np.integer))
        shape = SampleShape(
            length=config.sequence_length,
            extra=int(config.add_extra_token_to_sequence),
            pad=pad,
            eod=int(eod) if has_eod else 0,
            resets_positions=bool(config.reset_position_ids) and has_eod,
            masks_eod=bool(config.eod_mask_loss) and has_eod,
            keeps_documents_apart=config.inter_document_masking,
            masks_borders=config.mask_borders,
        )
        self.gather = partial(gather, shape=shape)
        self.spec = GPTSpec(
            length=shape.length,
            dataset_id=dataset_id,
            has_mask=config.create_attention_mask and not config.inter_document_masking,
            shares_mask=not (config.reset_attention_mask and has_eod),
            has_borders=config.create_cu_seqlens or config.inter_document_masking,
        )

    @cached_property
    def shared(self) -> Mapping[str, torch.Tensor]:
        """The attention mask, if there is one that all samples share."""
        is_shared = self.spec.has_mask and self.spec.shares_mask
        return {"attention_mask": sample.shared_mask(self.spec.length)} if is_shared else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSpec:
    """Specification of the tensors in batches of packs. See `BatchSpec`."""

    length: int
    """S, of a rank's part of each pack."""
    num_borders: int
    """M, at least two more than the pieces of a pack."""
    dataset_id: torch.dtype | None
    """Dtype of the dataset's number in a blend; None without a blend."""

    def tensors(self, size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of each tensor of a batch of B packs, in the order of a sample's keys."""
        label = {} if self.dataset_id is None else {"dataset_id": (self.dataset_id, (size,))}
        ids, borders = (torch.int64, (size, self.length)), (torch.int32, (size, self.num_borders))
        return {
            **label,
            "tokens": ids,
            "labels": ids,
            "loss_mask": (torch.float32, (size, self.length)),
            "position_ids": ids,
            "padding_mask": (torch.bool, (size, self.length)),
            "cu_seqlens": borders,
            "cu_seqlens_padded": borders,
            "max_seqlen": (torch.int32, (size,)),
            "cu_trained_tokens": borders,
            "num_trained_tokens": (torch.int64, (size,)),
            "num_documents": (torch.int64, (size,)),
        }

    def memory(self, size: int, arrays: dict[str, npt.NDArray[Any]]) -> PackedBatchArrays:
        """Returns the memory of a batch as the kernel takes it."""
        return PackedBatchArrays(arrays)


class PackedForm(BatchForm):
    """Form of batches of packs.

    Args:
        members: the datasets that packs are drawn from.
        config: their configuration.
        dataset_id: dtype of the dataset's number in a batch, or None to leave it out.
        context: the rank whose places of each pack are gathered.
    """

    spec: PackedSpec

    def __init__(
        self,
        members: Sequence[PackedSamples],
        config: GPTDatasetConfig,
        *,
        dataset_id: torch.dtype | None,
        context: Context = WHOLE,
    ) -> None:
        self._members, self._config = members, config
        num_borders = 2 + max(one.packs.most_pieces for one in members)
        self._shape = PackedShape(config.sequence_length, config.pack_multiple, num_borders, *context)
        self.spec = PackedSpec(length=self._shape.own_length, num_borders=num_borders, dataset_id=dataset_id)

    def in_context(self, context: Context) -> "PackedForm":
        """Returns the form of a rank's part of these batches."""
        return PackedForm(self._members, self._config, dataset_id=self.spec.dataset_id, context=context)

    def gather(
        self,
        sources: SampleSources,
        datasets: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        batch: Any,
        *,
        fetched: FetchedBytes,
        num_threads: int | None,
    ) -> Gathered:
        """Fills a batch: see `GatherKernel`."""
        if len(self._members) == 1:
            pieces, firsts = self._members[0].find(positions)
        else:
            pieces, firsts = find_by_group(datasets, lambda one, places: self._members[one].find(positions[places]))
        return gather_packs(
            sources, datasets, pieces, firsts, batch, self._shape, fetched=fetched, num_threads=num_threads
        )

    @property
    def shared(self) -> Mapping[str, torch.Tensor]:
        """No tensor: each pack has its own."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSpec:
    """Specification of the tensors in the batches of a masked dataset. See `BatchSpec`."""

    lengths: tuple[tuple[str, int | None], ...]
    """Names of the tensors, in the order of a sample's keys, and their lengths; None for a number."""
    dataset_id: torch.dtype | None
    """Dtype of the dataset's number in a blend; None without a blend."""

    def tensors(self, size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Returns dtype and shape of each tensor of a batch of B samples, in the order of a sample's keys."""
        label = {} if self.dataset_id is None else {"dataset_id": (self.dataset_id, (size,))}
        own = {name: (torch.int64, (size,) if length is None else (size, length)) for name, length in self.lengths}
        return {**label, **own}

    def memory(self, size: int, arrays: dict[str, npt.NDArray[Any]]) -> MaskedBatchArrays:
        """Returns the memory of a batch as the kernel takes it."""
        return MaskedBatchArrays(arrays)


class MaskedForm(BatchForm):
    """Form of the batches of masked datasets of one configuration."""

    spec: MaskedSpec

    def __init__(self, table: MaskingTable, spec: MaskedSpec) -> None:
        self.spec = spec
        self.gather = partial(gather_masked, table=table)

    @property
    def shared(self) -> Mapping[str, torch.Tensor]:
        """No tensor: each sample has its own."""
        return {}
