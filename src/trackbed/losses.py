"""Losses over trained labels that have the same gradients on any number of ranks and micro-batches.

Shapes: B samples of a batch, S places of a sample; B = 1 for packs end to end. M entries of a row of borders.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trackbed.comm import Group
from trackbed.comm.torch_group import check_initialized, device_for
from trackbed.errors import ArgumentError, CollectiveError
from trackbed.kernels.integers import check_at_least

__all__ = ["StepCounts", "document_mean", "document_weights", "step_counts", "token_mean"]

Batches = Sequence[Mapping[str, torch.Tensor]]
Exchange = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
"""Collective: sends `[K]` numbers, and returns the `[ranks, K]` numbers of all ranks."""

_BORDERS: Final = ("cu_seqlens_padded", "cu_seqlens_q_padded", "cu_seq_q", "cu_seqlens_q", "cu_seqlens")
"""Names of the borders of segments in all layouts; those with padding first."""
_COUNTS: Final = ("num_trained_tokens", "num_documents")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Trained labels and documents of one training step, of the micro-batches of all ranks."""

    num_trained_tokens: int
    """Trained labels, at least 0."""
    num_documents: int
    """Documents with a trained label; each piece of a document that was split is one. At least 0."""
    num_ranks: int = 1
    """Number of ranks over which gradients are averaged; 1 where they are summed."""


def step_counts(
    batches: Batches, group: "dist.ProcessGroup | Group | None" = None, *, context_size: int = 1
) -> StepCounts:
    """Collective over `group`: counts the trained labels and the documents of a training step.

    One exchange of four numbers. Either every rank returns or every rank raises. With
    `trackbed.DistributedDataParallel`, its method `step_counts` does the same over its own ranks.

    Args:
        batches: micro-batches of this rank in the step, with `num_trained_tokens` and `num_documents`; may be empty.
        group: ranks over which gradients are averaged, those that share a sample by context parallelism included; None
            for all ranks of `torch.distributed`, or this process if it is the only one.
        context_size: ranks that share each sample, whose batches have the counts of the whole sample.

    Raises:
        ArgumentError: this rank has something else than batches with counts, or `context_size` does not divide the
            number of ranks, or their sums.
        CollectiveError: another rank failed, or has another `context_size`.

    >>> batch = {"num_trained_tokens": torch.tensor([3, 0]), "num_documents": torch.tensor([2, 0])}
    >>> step_counts([batch, batch])
    StepCounts(num_trained_tokens=6, num_documents=4, num_ranks=1)
    """
    exchange, num_ranks = _exchange_over(group)
    return exchange_counts(batches, exchange, num_ranks=num_ranks, context_size=context_size)


def exchange_counts(batches: Batches, exchange: Exchange, *, num_ranks: int, context_size: int) -> StepCounts:
    """Collective over the ranks of `exchange`: `step_counts` over any collective.

    Args:
        batches: micro-batches of this rank.
        exchange: the collective.
        num_ranks: ranks over which gradients are averaged; 1 where they are summed.
        context_size: ranks that share each sample.
    """
    problem: Exception | None = None
    own = np.zeros(4, dtype=np.int64)
    try:
        check_at_least(1, context_size=context_size)
        own[:3] = (context_size, *_own_counts(batches))
        _check_parts(batches, context_size)
    except Exception as error:  # noqa: BLE001  the other ranks must learn of it, or they would wait
        problem, own[3] = error, 1
    rows = exchange(own)
    if problem is not None:
        raise problem
    failed = np.flatnonzero(rows[:, 3]).tolist()
    if failed:
        raise CollectiveError(f"step_counts: rank {failed[0]} failed; its own error says why")
    sizes = rows[:, 0]
    if (sizes != sizes[0]).any():
        rank = int(np.flatnonzero(sizes != sizes[0])[0])
        raise CollectiveError(
            f"step_counts: context_size must be the same on all ranks, found {sizes[0]} on rank 0 and {sizes[rank]} on "
            f"rank {rank}"
        )
    sums = rows[:, 1:3].sum(axis=0).tolist()
    if len(rows) % context_size or any(one % context_size for one in sums):
        raise ArgumentError(
            f"context_size must divide {len(rows)} ranks, and the sums of their counts {sums}, found {context_size}"
        )
    tokens, documents = (one // context_size for one in sums)
    return StepCounts(num_trained_tokens=tokens, num_documents=documents, num_ranks=num_ranks)


def token_mean(losses: torch.Tensor, batch: Mapping[str, torch.Tensor], counts: StepCounts) -> torch.Tensor:
    """Returns this batch's part of the mean loss of all trained labels of a step.

    Gradients that are added up over micro-batches and averaged over ranks are those of the mean. So is the loss that is
    added up and averaged. Without any trained label in the step, both are 0.

    Args:
        losses: loss of each label, of the shape of `loss_mask`, or flat. What is not trained may be NaN or infinite.
        batch: its `loss_mask` says which labels are trained.
        counts: those of the step.

    Returns:
        Scalar, in float32 or the type of `losses` if that is wider.

    Raises:
        ArgumentError: `losses` has another shape.
    """
    return _weighted_sum(losses, batch["loss_mask"]) * (counts.num_ranks / max(counts.num_trained_tokens, 1))


def document_mean(losses: torch.Tensor, batch: Mapping[str, torch.Tensor], counts: StepCounts) -> torch.Tensor:
    """Returns this batch's part of the mean over the documents of a step of each document's mean loss.

    Each document counts alike, however many trained labels it has; those without one are left out. Otherwise as
    `token_mean`.

    Args:
        losses: loss of each label, of the shape of `loss_mask`, or flat. What is not trained may be NaN or infinite.
        batch: packs, in any layout; or the part of a rank of a context.
        counts: those of the step.

    Raises:
        ArgumentError: `losses` has another shape, or the batch has no borders of packs.
    """
    weights = document_weights(batch, dtype=torch.promote_types(losses.dtype, torch.float32))
    return _weighted_sum(losses, weights) * (counts.num_ranks / max(counts.num_documents, 1))


def document_weights(batch: Mapping[str, torch.Tensor], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the weight of each label in its document's mean: 1 / trained labels of the document, or 0.

    A rank of a context has the weights of its places, whose sum over the ranks is 1 for each document.

    Args:
        batch: packs with `loss_mask`, `cu_trained_tokens` and borders, in any layout; or the part of a rank of a
            context, `[B, S / ranks]`.
        dtype: floating-point type of the weights.

    Returns:
        Weights of the shape of `loss_mask`.

    Raises:
        ArgumentError: the batch has no borders, or not as many as sums of trained labels.

    >>> batch = {"loss_mask": torch.tensor([[0.0, 1.0, 1.0, 1.0]]), "cu_seqlens_padded": torch.tensor([0, 3, 4])}
    >>> document_weights({**batch, "cu_trained_tokens": torch.tensor([0, 2, 3])})
    tensor([[0.0000, 0.5000, 0.5000, 1.0000]])
    """
    mask = batch["loss_mask"]
    named = next((name for name in _BORDERS if name in batch), None)
    if named is None or "cu_trained_tokens" not in batch:
        raise ArgumentError(
            f"batch must be of packs, with borders and cu_trained_tokens, found {', '.join(batch)}: order='packed' has "
            "them"
        )
    ends, sums = batch[named], batch["cu_trained_tokens"]
    if ends.shape != sums.shape:
        raise ArgumentError(
            f"{named} and cu_trained_tokens must have one shape, found {list(ends.shape)} and {list(sums.shape)}"
        )
    if not mask.numel():
        return mask.to(dtype)
    size = mask.shape[-1]
    ends, sums = (one.reshape(-1, ends.shape[-1]) for one in (ends, sums))  # [B, M]
    num_parts = ends[:, -1:] // size  # ranks that share the samples
    places = torch.arange(size, dtype=ends.dtype, device=ends.device).repeat(len(ends), 1)
    segments = torch.searchsorted((ends[:, 1:] // num_parts).contiguous(), places, right=True)
    trained = sums.diff(dim=1).gather(1, segments).reshape(mask.shape)
    return mask.to(dtype) / trained.clamp(min=1)


def _weighted_sum(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the sum of losses times weights, in at least float32. Losses of weight 0 are not read."""
    if losses.shape != weights.shape and tuple(losses.shape) != (weights.numel(),):
        raise ArgumentError(
            f"losses must have the shape of loss_mask, {list(weights.shape)}, or be flat, found {list(losses.shape)}"
        )
    wide = losses.reshape(weights.shape).to(torch.promote_types(losses.dtype, torch.float32))
    return (torch.where(weights != 0, wide, 0) * weights).sum()


def _own_counts(batches: Any) -> tuple[int, ...]:
    """Returns the sums of a rank's micro-batches."""
    if isinstance(batches, Mapping) or not isinstance(batches, Sequence):
        raise ArgumentError(f"batches must be a list of micro-batches, found a {type(batches).__name__}")
    lacking = next((one for one in batches if not one.keys() >= set(_COUNTS)), None)
    if lacking is not None:
        raise ArgumentError(f"batches must have {' and '.join(_COUNTS)}, found {', '.join(lacking)}")
    return tuple(sum(int(one[name].sum()) for one in batches) for name in _COUNTS)


def _check_parts(batches: Batches, context_size: int) -> None:
    """Raises an ArgumentError if batches are the parts of ranks of a context of another size."""
    for batch in batches:
        named = next((name for name in _BORDERS if name in batch), None)
        if named is None or "loss_mask" not in batch or not batch["loss_mask"].numel():
            continue
        places, own = int(batch[named].reshape(-1)[-1]), batch["loss_mask"].shape[-1]
        if own != places and places != own * context_size:
            raise ArgumentError(
                f"context_size must be {places / own:g}, as batches have {own:,} of {places:,} places, found "
                f"{context_size}"
            )


def _exchange_over(group: Any) -> tuple[Exchange, int]:
    """Returns the exchange of a group, and the number of its ranks."""
    if group is None:
        check_initialized("step_counts")
        if not (dist.is_available() and dist.is_initialized()):
            return lambda own: own[None], 1
        group = dist.group.WORLD
    if isinstance(group, int):  # torch gives a number to ranks that are not members
        raise ArgumentError("group: this process must belong to it, but does not")
    if not callable(group.size):
        return lambda own: np.array(group.all_gather(own.tolist()), dtype=np.int64), group.size
    return lambda own: _exchange_tensors(own, group), group.size()


def _exchange_tensors(own: npt.NDArray[np.int64], group: dist.ProcessGroup) -> npt.NDArray[np.int64]:
    """Collective over a process group of torch: see `Exchange`."""
    sent = torch.from_numpy(own).to(device_for(group))
    rows = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(rows, sent, group=group)
    found: npt.NDArray[np.int64] = torch.stack(rows).cpu().numpy()
    return found
