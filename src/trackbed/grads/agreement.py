"""Agreement of the ranks on what they wrap, and on how they communicate."""

import hashlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trackbed.comm import Group
from trackbed.errors import CollectiveError
from trackbed.grads.buffer import _ParamAndGradBuffer
from trackbed.grads.collectives import Collectives, SharedMemoryCollectives, SoloCollectives, TorchCollectives
from trackbed.grads.collectives.arrays import SUMMABLE
from trackbed.grads.config import Options
from trackbed.grads.memory_order import dims_in_memory, fills_memory
from trackbed.grads.process_groups import GroupOfRanks

__all__ = ["agree", "connect", "describe_buffers", "describe_frozen", "describe_options", "describe_orders"]

logger = logging.getLogger(__name__)


def describe_options(config: Options, **more: Any) -> list[str]:
    """One line for each option that must be the same on all ranks."""
    own = vars(config)
    return [f"option {name} = {value!r}" for name, value in (own | more).items()]


def describe_buffers(buffers: Sequence[_ParamAndGradBuffer]) -> list[str]:
    """One line for each parameter, in order of definition within its buffer."""
    return [
        f"parameter {buffer.param_to_name[param]!r} of shape {list(param.shape)}, {buffer.param_dtype}, with gradients "
        f"of {buffer.grad_dtype} on {buffer.grad_data.device.type}, at element {start:,} of buffer {number}, in bucket "
        f"{bucket}"
        for number, buffer in enumerate(buffers)
        for param, start, bucket in zip(
            buffer.params, buffer.layout.starts.tolist(), buffer.layout.buckets.tolist(), strict=True
        )
    ]


def describe_frozen(named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[str]:
    """One line for each parameter that requires no gradient; `broadcast_params` sends these too."""
    return [
        f"frozen parameter {name!r} of shape {list(param.shape)}, {param.dtype}, on {param.device.type}"
        for name, param in named
        if not param.requires_grad
    ]


def describe_orders(named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[str]:
    """One line for each parameter whose elements fill their memory in another order than that of their indices."""
    return [
        f"parameter {name!r} with dimensions in the order {dims_in_memory(param)} in memory"
        for name, param in named
        if not param.is_contiguous() and fills_memory(param)
    ]


def agree(group: Group, lines: Sequence[str], *, may_differ: Sequence[str] = ()) -> bool:
    """Collective over `group`: checks that all ranks have the same lines.

    Args:
        group: the ranks.
        lines: lines of this rank.
        may_differ: further lines, which are compared only.

    Returns:
        True if the further lines are the same on all ranks, too.

    Raises:
        CollectiveError: they do not. The message has a rank that differs from most, and the first lines that differ.
    """
    pairs_of_ranks = group.all_gather([_digest_of(lines), _digest_of(may_differ)])
    digests = [digest for digest, _ in pairs_of_ranks]
    if len(set(digests)) == 1:
        return len({digest for _, digest in pairs_of_ranks}) == 1
    of_ranks = group.all_gather(list(lines))
    usual = max(range(len(digests)), key=lambda rank: (digests.count(digests[rank]), -rank))
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[usual])
    theirs, others = of_ranks[rank], of_ranks[usual]
    pairs = itertools.zip_longest(theirs, others, fillvalue="no further parameter")
    here, there = next((one, other) for one, other in pairs if one != other)
    msg = f"model and options must be the same on every rank, but rank {rank} has {here}, and rank {usual} {there}"
    raise CollectiveError(msg)


def _digest_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def connect(process_group: Any, group: Group, buffers: Sequence[_ParamAndGradBuffer], config: Options) -> Collectives:
    """Collective over `group`: chooses the collectives for some buffers, the same on all ranks.

    Args:
        process_group: torch's process group, or a `GroupOfRanks`, of the ranks that reduce the buffers.
        group: the same ranks, for messages.
        buffers: buffers.
        config: options.

    Raises:
        CollectiveError: the ranks cannot share memory, but are to, or have no other way.
    """
    has_torch = not isinstance(process_group, GroupOfRanks)
    if process_group.size() == 1 and not (has_torch and config.collectives == "torch"):
        return SoloCollectives()
    why = _why_not_shared(buffers, config)
    if why is None and config.collectives != "torch":
        memories = [memory for buffer in buffers for memory in buffer.memories]
        shared = [memory.shared for memory in memories if memory.shared is not None]
        problem = next((memory.problem for memory in memories if memory.problem is not None), None)
        found = SharedMemoryCollectives.connect(group, shared, problem)
        if not isinstance(found, str):
            return found
        why = found
    if config.collectives == "shared_memory" or not has_torch:
        msg = f"collectives: ranks must share memory, but {why or 'the option is torch, and there is no process group'}"
        raise CollectiveError(msg)
    if why is not None:
        logger.info("gradients are reduced by torch, because %s", why)
    device = buffers[0].grad_data.device if buffers else None
    return TorchCollectives(
        process_group, fp32_accumulation=config.reduce_scatter_with_fp32_accumulation, device=device
    )


def _why_not_shared(buffers: Sequence[_ParamAndGradBuffer], config: Options) -> str | None:
    """Reason why buffers cannot be reduced in shared memory; None if they can."""
    if config.num_distributed_optimizer_instances > 1:
        return "the optimizer has several instances"
    for buffer in buffers:
        if buffer.grad_data.device != torch.device("cpu"):
            return f"gradients lie on {buffer.grad_data.device}"
        if buffer.grad_dtype not in SUMMABLE:
            return f"gradients have the type {buffer.grad_dtype}"
    return None
