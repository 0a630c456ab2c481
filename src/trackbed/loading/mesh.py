"""Parts of a batch for ranks that share it: of a context-parallel group, of pipeline stages, and of ranks without data.

Shapes: B samples of a batch, S tokens of a sample.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from trackbed.comm.torch_group import device_for
from trackbed.errors import ArgumentError, CollectiveError
from trackbed.kernels.integers import check_at_least

_MASK: Final = "attention_mask"
_BORDERS: Final = ("cu_seqlens", "max_seqlen")
_FIRST: Final = ("tokens", "position_ids")
_LAST: Final = ("labels", "loss_mask")
_EVERY: Final = (_MASK, *_BORDERS, "dataset_id")


def slice_for_context(batch: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """Returns the part of a batch that a rank of a context-parallel group has.

    Samples are cut into 2 x size equal parts, of which the rank has the rank-th one and the one that is as far from the
    end: with causal attention all ranks then have the same work. As `get_batch_on_this_cp_rank` of Megatron Core.

    Args:
        batch: tensors by name: `[B, S, ...]`, which are cut in their second axis, an `attention_mask` `[B, 1, S, S]`,
            which is cut in its third, and tensors of one axis, such as `dataset_id`, which stay as they are.
        rank: number of the rank in its context-parallel group, in `[0, size)`.
        size: ranks of that group, at least 1.

    Raises:
        ArgumentError: S is no multiple of 2 x size, the batch has `cu_seqlens`, or `rank` is none.

    >>> slice_for_context({"tokens": torch.arange(8)[None]}, 1, 2)["tokens"]
    tensor([[2, 3, 4, 5]])
    """
    check_at_least(1, size=size)
    check_at_least(0, rank=rank)
    if rank >= size:
        raise ArgumentError(f"rank must be below size {size}, found {rank}")
    if size == 1:
        return dict(batch)
    borders = [name for name in _BORDERS if name in batch]
    if borders:
        raise ArgumentError(f"a batch that is cut for {size} ranks must have no borders of documents, found {borders}")
    return {name: _cut(name, tensor, rank, size) for name, tensor in batch.items()}


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

    >>> sorted(keys_for_stage(1, 2))
    ['attention_mask', 'cu_seqlens', 'dataset_id', 'labels', 'loss_mask', 'max_seqlen']
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
