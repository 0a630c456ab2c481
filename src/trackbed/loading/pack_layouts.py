"""Layouts of a batch of packs, as attention over documents of varying length takes it.

Shapes: B packs, S places of a pack, T = B x S, n segments of all packs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
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


Arrays = Mapping[str, npt.NDArray[Any]]


class Layout(NamedTuple):
    """A layout of batches of packs."""

    join: Callable[[Batch], Batch]
    """Returns a batch with tensors that view those of the rows."""
    arrays: Callable[[Batch], dict[str, Any]]
    """Returns the same for `Ring.lend`: new arrays that view the memory of the rows, and tensors of its own."""


def layout_of(name: str, *, pads_borders: bool) -> Layout:
    """Returns a layout.

    Args:
        name: "thd" for the batch of Megatron Core, "torch" for that of torch's attention over varying lengths, "bridge"
            for that of Megatron-Bridge.
        pads_borders: True for as many borders in each batch, as CUDA graphs need them.

    Raises:
        ArgumentError: there is no such layout.
    """
    if name not in LAYOUTS:
        raise ArgumentError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}, found {name!r}")
    given: dict[str, Any] = {"own": _OWN[name], "pads_borders": pads_borders}
    return Layout(partial(_joined, **given), partial(_laid_out, **given))


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
    return _joined(batch, _thd, pads_borders=pads_borders)


def as_torch(batch: Mapping[str, torch.Tensor], *, pads_borders: bool = False) -> Batch:
    """Returns a batch of packs end to end with the names of torch's attention over varying lengths.

    As `as_thd`, but with `cu_seq_q` and `cu_seq_k` int32 `[n + 1]`, where segments lie, and `max_q` and `max_k`, int64
    of no axis, the length of the longest segment. Counts are as in `as_thd`.
    """
    return _joined(batch, _torch, pads_borders=pads_borders)


def as_bridge(batch: Mapping[str, torch.Tensor], *, pads_borders: bool = False) -> Batch:
    """Returns a batch of one pack with the names of Megatron-Bridge.

    `tokens`, `labels`, `position_ids`, `loss_mask` and `padding_mask` `[1, S]`; `cu_seqlens_q` and `cu_seqlens_kv`
    int32 `[1, n + 1]`, and with padding of documents `cu_seqlens_q_padded` and `cu_seqlens_kv_padded`; `max_seqlen_q`
    and `max_seqlen_kv` int32 `[1, 1]`; `cu_trained_tokens` int32 `[1, n + 1]`, and the other counts as in `as_thd`.

    Raises:
        ArgumentError: the batch has several packs.
    """
    return _joined(batch, _bridge, pads_borders=pads_borders)


def _thd(borders: JoinedBorders, _: int) -> dict[str, torch.Tensor]:
    logical, padded, trained = map(torch.from_numpy, borders[:3])
    longest = torch.from_numpy(borders.longest)
    own = {"cu_seqlens": logical, "cu_seqlens_padded": padded, "max_seqlen": longest}
    return {**own, "cu_trained_tokens": trained}


def _torch(borders: JoinedBorders, _: int) -> dict[str, torch.Tensor]:
    cu_seq, longest = torch.from_numpy(borders.padded), torch.tensor(int(np.diff(borders.padded).max(initial=0)))
    own = {"cu_seq_q": cu_seq, "cu_seq_k": cu_seq, "max_q": longest, "max_k": longest}
    return {**own, "cu_trained_tokens": torch.from_numpy(borders.trained)}


def _bridge(borders: JoinedBorders, num_packs: int) -> dict[str, torch.Tensor]:
    if num_packs != 1:
        raise ArgumentError(f"a batch in Megatron-Bridge's layout must have 1 pack, found {num_packs}")
    logical, padded, trained = (torch.from_numpy(one)[None] for one in borders[:3])
    longest = torch.from_numpy(borders.longest)[None]
    own = {"cu_seqlens_q": logical, "cu_seqlens_kv": logical}
    if not torch.equal(logical, padded):
        own |= {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded}
    return {**own, "max_seqlen_q": longest, "max_seqlen_kv": longest, "cu_trained_tokens": trained}


_Own = Callable[[JoinedBorders, int], dict[str, torch.Tensor]]
"""Makes tensors of a layout's own from the borders and the number of packs."""
_OWN: Final[dict[str, _Own]] = {"thd": _thd, "torch": _torch, "bridge": _bridge}


def _borders(rows: Arrays, *, pads_borders: bool) -> JoinedBorders:
    """Returns the borders of all packs, one after the other, and their counts.

    Args:
        rows: arrays of the packs, with those in `_PER_PACK`.
        pads_borders: True for as many borders in each batch.

    Raises:
        ArgumentError: T is too large for int32.
    """
    found = join_borders(rows, keeps_all=pads_borders)
    if found.num_places > _HIGHEST:
        raise ArgumentError(
            f"a batch must have at most {_HIGHEST} places for borders of int32, found {found.num_places}"
        )
    return found


def _laid_out(batch: Batch, *, own: _Own, pads_borders: bool) -> dict[str, Any]:
    """Returns the places of all packs end to end, as arrays that view those of the rows, and tensors of its own."""
    borders = _borders({name: batch.array(name) for name in _PER_PACK}, pads_borders=pads_borders)
    views = {"dataset_id": batch.array("dataset_id").view()} if "dataset_id" in batch else {}
    views |= {name: batch.array(name).reshape(1, -1) for name in _PLACES}
    return {**views, **own(borders, batch.size), **_counts(borders)}


def _joined(batch: Mapping[str, torch.Tensor], own: _Own, *, pads_borders: bool) -> Batch:
    """Does the same, with tensors that view the rows."""
    borders = _borders({name: batch[name].numpy() for name in _PER_PACK}, pads_borders=pads_borders)
    views = {"dataset_id": batch["dataset_id"]} if "dataset_id" in batch else {}
    views |= {name: batch[name].view(1, -1) for name in _PLACES}
    return Batch({**views, **own(borders, len(batch["tokens"])), **_counts(borders)})


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
