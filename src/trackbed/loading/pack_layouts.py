"""Layouts of a batch of packs, as attention over documents of varying length takes it.

Shapes: B packs, S places of a pack, T = B x S, n segments of all packs.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import numpy as np
import torch

from trackbed.datasets import Batch
from trackbed.datasets.batches.context import WHOLE, Context
from trackbed.errors import ArgumentError
from trackbed.kernels.packing import JoinedBorders, join_borders

LayoutName = Literal["thd", "torch", "bridge"]
LAYOUTS: Final[tuple[LayoutName, ...]] = get_args(LayoutName)
_PLACES: Final = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")
_PER_PACK: Final = (
    *("cu_seqlens", "cu_seqlens_padded", "cu_trained_tokens"),
    *("max_seqlen", "num_trained_tokens", "num_documents"),
)
_HIGHEST: Final = int(np.iinfo(np.int32).max)


def layout_of(name: str, *, pads_borders: bool) -> Callable[[Batch], Batch]:
    """Returns the function that lays out a batch.

    Args:
        name: "thd" for the batch of Megatron Core, "torch" for that of torch's attention over varying lengths, "bridge"
            for that of Megatron-Bridge.
        pads_borders: True for as many borders in each batch, as CUDA graphs need them.

    Raises:
        ArgumentError: there is no such layout.
    """
    if name not in LAYOUTS:
        raise ArgumentError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, found {name!r}")
    found: dict[str, Callable[..., Batch]] = {"thd": as_thd, "torch": as_torch, "bridge": as_bridge}
    return lambda batch: found[name](batch, pads_borders=pads_borders)


def as_thd(batch: Mapping[str, torch.Tensor], *, pads_borders: bool = False) -> Batch:
    """Returns a batch of packs end to end, as Megatron Core's main branch has it.

    `tokens`, `labels` and `position_ids` int64, `loss_mask` float32 and `padding_mask` bool, `[1, T]`; `cu_seqlens` and
    `cu_seqlens_padded` int32 `[n + 1]`, of which the second has where segments lie, and the first their places without
    padding; `max_seqlen` int32 `[1]`, the padded length of the longest document; `cu_trained_tokens` int32 `[n + 1]`,
    the trained labels before each border; `num_trained_tokens` and `num_documents`, int64 `[1]`, the number of trained
    labels, and that of the documents with any; and of a blend `dataset_id` `[B]`.

    Args:
        batch: rows of packs, as `gather` of a dataset in the order "packed" returns them.
        pads_borders: True for as many borders in each batch, of which the last one is repeated.
    """
    borders = _borders(batch, pads_borders=pads_borders)
    logical, padded, trained = map(torch.from_numpy, borders[:3])
    longest = torch.from_numpy(borders.longest)
    own = {"cu_seqlens": logical, "cu_seqlens_padded": padded, "max_seqlen": longest}
    return _joined(batch, {**own, "cu_trained_tokens": trained, **_counts(borders)})


def as_torch(batch: Mapping[str, torch.Tensor], *, pads_borders: bool = False) -> Batch:
    """Returns a batch of packs end to end with the names of torch's attention over varying lengths.

    As `as_thd`, but with `cu_seq_q` and `cu_seq_k` int32 `[n + 1]`, where segments lie, and `max_q` and `max_k`, int64
    of no axis, the length of the longest segment. Counts are as in `as_thd`.
    """
    borders = _borders(batch, pads_borders=pads_borders)
    cu_seq, longest = torch.from_numpy(borders.padded), torch.tensor(int(np.diff(borders.padded).max(initial=0)))
    own = {"cu_seq_q": cu_seq, "cu_seq_k": cu_seq, "max_q": longest, "max_k": longest}
    return _joined(batch, {**own, "cu_trained_tokens": torch.from_numpy(borders.trained), **_counts(borders)})


def as_bridge(batch: Mapping[str, torch.Tensor], *, pads_borders: bool = False) -> Batch:
    """Returns a batch of one pack with the names of Megatron-Bridge.

    `tokens`, `labels`, `position_ids`, `loss_mask` and `padding_mask` `[1, S]`; `cu_seqlens_q` and `cu_seqlens_kv`
    int32 `[1, n + 1]`, and with padding of documents `cu_seqlens_q_padded` and `cu_seqlens_kv_padded`; `max_seqlen_q`
    and `max_seqlen_kv` int32 `[1, 1]`; `cu_trained_tokens` int32 `[1, n + 1]`, and the other counts as in `as_thd`.

    Raises:
        ArgumentError: the batch has several packs.
    """
    if len(batch["tokens"]) != 1:
        raise ArgumentError(f"a batch in Megatron-Bridge's layout must have 1 pack, found {len(batch['tokens'])}")
    borders = _borders(batch, pads_borders=pads_borders)
    logical, padded, trained = (torch.from_numpy(one)[None] for one in borders[:3])
    longest = torch.from_numpy(borders.longest)[None]
    own = {"cu_seqlens_q": logical, "cu_seqlens_kv": logical}
    if not torch.equal(logical, padded):
        own |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    own |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    return _joined(batch, {**own, "cu_trained_tokens": trained, **_counts(borders)})


def _borders(batch: Mapping[str, torch.Tensor], *, pads_borders: bool) -> JoinedBorders:
    """Returns the borders of all packs, one after the other, and their counts.

    Raises:
        ArgumentError: T is too large for int32.
    """
    found = join_borders({name: batch[name].numpy() for name in _PER_PACK}, keeps_all=pads_borders)
    if found.num_places > _HIGHEST:
        raise ArgumentError(
            f"a batch must have at most {_HIGHEST} places for borders of int32, found {found.num_places}"
        )
    return found


def _joined(batch: Mapping[str, torch.Tensor], own: dict[str, torch.Tensor]) -> Batch:
    """Returns the places of all packs end to end, which view those of the rows, and tensors of the layout's own."""
    views = {"dataset_id": batch["dataset_id"]} if "dataset_id" in batch else {}
    views |= {name: batch[name].view(1, -1) for name in _PLACES}
    return Batch({**views, **own}, shared=own.keys())


def _counts(borders: JoinedBorders) -> dict[str, torch.Tensor]:
    """Trained labels, and documents with any, of all packs."""
    tokens, documents = borders.counts[:1], borders.counts[1:]
    return {"num_trained_tokens": torch.from_numpy(tokens), "num_documents": torch.from_numpy(documents)}


def check_context(dataset: Any, context: Context) -> None:
    """Raises an ArgumentError unless a rank can gather its part of each pack of a dataset."""
    context.check()
    if context == WHOLE:
        return
    config = getattr(dataset, "config", None)
    order, multiple = getattr(config, "order", None), getattr(config, "pack_multiple", 1)
    if order != "packed":
        raise ArgumentError(f"context_size={context.size} needs a dataset in the order 'packed', found {order!r}")
    if multiple % (2 * context.size):
        raise ArgumentError(
            f"pack_multiple must be a multiple of {2 * context.size} for context_size {context.size}, found {multiple}"
        )


def check_layout(dataset: Any, name: str | None) -> None:
    """Raises an ArgumentError unless a dataset has packs to lay out."""
    order = getattr(getattr(dataset, "config", None), "order", None)
    if name is not None and order != "packed":
        raise ArgumentError(f"layout={name!r} needs a dataset in the order 'packed', found {order!r}")
