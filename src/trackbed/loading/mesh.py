"""Parts of a batch for ranks that share it: of a context-parallel group, of pipeline stages, and of ranks without data.

Shapes: B samples of a batch, S tokens of a sample.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from trackbed.comm.torch_group import device_for
from trackbed.datasets.batches.context import OF_PLACES, Context, places_of, slice_rows
from trackbed.errors import ArgumentError, CollectiveError
from trackbed.kernels.integers import check_at_least

_MASK: Final = "attention_mask"
_ENDS: Final = (
    *("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
    *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_kv", "cu_seq_q", "cu_seq_k"),
)
"""Borders of segments, in all layouts; those of a batch with padding first."""
_LONGEST: Final = ("max_seqlen", "max_seqlen_q", "max_seqlen_kv", "max_q", "max_k")
_COUNTS: Final = ("cu_trained_tokens", "num_trained_tokens", "num_documents")
"""Counts of the whole batch, which all ranks that share it need."""
_FIRST: Final = ("tokens", "position_ids")
_LAST: Final = ("labels", "loss_mask")
_EVERY: Final = (_MASK, *_ENDS, *_LONGEST, *_COUNTS, "padding_mask", "dataset_id")


def slice_for_context(batch: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Returns the part of a batch that a rank of a context-parallel group has.

    Samples are cut into 2 x size equal parts, of which the rank has the rank-th one and the one that is as far from the
    end: with causal attention all ranks then have the same work. As `get_batch_on_this_cp_rank` of Megatron Core. Of
    packs end to end, as `BatchLoader` with a `layout` returns them, each segment is cut in this way, as by
    TransformerEngine's `thd_get_partitioned_indices`; their borders and counts stay those of the whole batch. So is
    each segment of rows of packs. `BatchLoader` with `context_size` gathers this part alone.

    Args:
        batch: tensors by name: `[B, S, ...]`, which are cut in their second axis, an `attention_mask` `[B, 1, S, S]`,
            which is cut in its third, and tensors of one axis, such as `dataset_id`, which stay as they are; or packs
            with their borders, end to end, `[1, T]`, or in rows, `[B, S]`.
        rank: number of the rank in its context-parallel group, in `[0, size)`.
        size: ranks of that group, at least 1.

    Raises:
        ArgumentError: S or the length of a segment is no multiple of 2 x size, the borders are not those of the packs,
            or `rank` is none.

    >>> slice_for_context({"tokens": torch.arange(8)[None]}, 1, 2)["tokens"]
    tensor([[2, 3, 4, 5]])
    """
    check_at_least(1, size=size)
    check_at_least(0, rank=rank)
    if rank >= size:
        raise ArgumentError(f"rank must be below size {size}, found {rank}")
    if size == 1:
        return dict(batch)
    named = next((name for name in _ENDS if name in batch), None)
    if named is None:
        return {name: _cut(name, tensor, rank, size) for name, tensor in batch.items()}
    if batch[named].dim() == 2 and len(batch[named]) != 1:
        return _slice_rows(batch, named, Context(rank, size))
    borders = batch[named].reshape(-1)
    others = (*_ENDS, *_LONGEST, *_COUNTS, "dataset_id")
    length = int(borders[-1]) if len(borders) else 0
    wrong = [name for name, one in batch.items() if name not in others and tuple(one.shape[:2]) != (1, length)]
    if wrong:
        raise ArgumentError(
            f"a batch with borders must be packs end to end, [1, {length}] by {named}, found {wrong[0]} of shape "
            f"{list(batch[wrong[0]].shape)}: give BatchLoader a layout"
        )
    places = torch.from_numpy(places_of(borders.cpu().numpy(), Context(rank, size))).to(borders.device)
    return {name: one if name in others else one.index_select(1, places) for name, one in batch.items()}


def _slice_rows(batch: Mapping[str, torch.Tensor], named: str, context: Context) -> dict[str, torch.Tensor]:
    """Returns the part of rows of packs that a rank has."""
    borders = batch[named]
    length = int(borders[0, -1]) if borders.numel() else batch["tokens"].shape[1]
    shape = (len(borders), length)
    wrong = [name for name in OF_PLACES if name in batch and tuple(batch[name].shape) != shape]
    if wrong or "attention_mask" in batch:
        name = wrong[0] if wrong else "attention_mask"
        raise ArgumentError(
            f"rows with borders must be {list(shape)} by {named}, found {name} of shape {list(batch[name].shape)}"
        )
    return slice_rows(batch, borders, context)


def _cut(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    axis = 2 if name == _MASK else 1
    if tensor.dim() <= axis:
        return tensor
    if tensor.shape[axis] % (2 * size):
        raise ArgumentError(f"{name} must have a multiple of {2 * size} tokens, found {tensor.shape[axis]}")
    parts = tensor.chunk(2 * size, dim=axis)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]], dim=axis)


def keys_for_stage(stage: int, stages: int) -> frozenset[str]:
    """Returns the names of the tensors of a batch that a stage of a pipeline uses.

    The first stage uses tokens and positions, the last one labels and the loss mask, and each of them the attention
    mask and borders of documents, if there are any.

    Args:
        stage: number of the stage, in `[0, stages)`.
        stages: number of stages, at least 1.

    Raises:
        ArgumentError: there is no such stage.

    >>> sorted(keys_for_stage(0, 2) - keys_for_stage(1, 2)), sorted(keys_for_stage(1, 2) - keys_for_stage(0, 2))
    (['position_ids', 'tokens'], ['labels', 'loss_mask'])
    """
    check_at_least(1, stages=stages)
    check_at_least(0, stage=stage)
    if stage >= stages:
        raise ArgumentError(f"stage must be below stages {stages}, found {stage}")
    return frozenset([*_EVERY, *(_FIRST if stage == 0 else ()), *(_LAST if stage == stages - 1 else ())])


def broadcast_batch(
    batch: Mapping[str, torch.Tensor] | None,
    group: "dist.ProcessGroup | None" = None,
    *,
    device: torch.device | str | None = None,
) -> dict[str, torch.Tensor]:
    """Collective over a process group: returns the batch of its rank 0 on each of its ranks.

    For ranks that cannot read the data, such as those of a tensor-parallel group whose first rank alone has a loader.

    Args:
        batch: tensors by name, on the first rank of the group; None on the others, where it is ignored.
        group: process group of torch; by default all processes.
        device: device of the tensors that are returned; by default that from which the group sends.

    Raises:
        ArgumentError: on the first rank: it has no batch.
        CollectiveError: on the others then.
    """
    is_source = dist.get_rank(group) == 0
    place = torch.device(device) if device is not None else device_for(group)
    problem = None if not is_source else _problem(batch)
    sent = batch if is_source and batch is not None and problem is None else {}
    told: list[Any] = [problem, [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in sent.items()]]
    dist.broadcast_object_list(told, group=group, group_src=0, device=device_for(group, near=place))
    if told[0] is not None:
        if is_source:
            raise ArgumentError(told[0])
        raise CollectiveError(f"broadcast_batch: rank 0 of the group: {told[0]}")
    found = {}
    for name, dtype, shape in told[1]:
        tensor = torch.empty(shape, dtype=dtype, device=place)
        if is_source:
            tensor.copy_(sent[name])
        dist.broadcast(tensor, group=group, group_src=0)
        found[name] = tensor
    return found


def _problem(batch: object) -> str | None:
    """Says why a batch cannot be sent; None if it can."""
    if not isinstance(batch, Mapping):
        return f"batch must be tensors by name on the first rank, found a {type(batch).__name__}"
    wrong = [name for name, one in batch.items() if not isinstance(name, str) or not isinstance(one, torch.Tensor)]
    return f"batch must be tensors by name, found another value under {wrong[0]!r}" if wrong else None
