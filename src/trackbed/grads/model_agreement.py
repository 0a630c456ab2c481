"""Ranks of a wrapped model: their groups, their agreement on options and parameters, and the values they begin with."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from trackbed.comm import SOLO, Group
from trackbed.comm.difference import digest_of, find_difference
from trackbed.comm.tensor_digest import tensor_digest
from trackbed.comm.torch_group import TorchGroup, check_initialized
from trackbed.errors import ArgumentError, CollectiveError, GradientError
from trackbed.grads.buffer import _ParamAndGradBuffer, dims_in_memory, fills_memory
from trackbed.grads.collectives import Collectives, SharedMemoryCollectives, SoloCollectives, TorchCollectives
from trackbed.grads.collectives.protocol import SUMMABLE
from trackbed.grads.config import ReductionOptions
from trackbed.grads.failure_aware_wait import Waiter
from trackbed.grads.parameter_set import is_expert


@dataclass(frozen=True, slots=True)
class GroupOfRanks:
    """A `Group` with the methods that Megatron Core expects of a process group."""

    group: Group = SOLO

    def rank(self) -> int:
        """Number of this process."""
        return self.group.rank

    def size(self) -> int:
        """Number of processes."""
        return self.group.size


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Process groups over which a model is data-parallel. Each has `rank()` and `size()`."""

    dense: Any
    """All data-parallel ranks."""
    experts: Any
    """Ranks with the same experts."""

    @classmethod
    def of(cls, process_group: Any = None, expert_process_group: Any = None) -> "ProcessGroups":
        """Returns the groups of a wrapper's arguments.

        Args:
            process_group: torch's process group, or a `Group`; by default all ranks.
            expert_process_group: ranks with the same experts; by default `process_group`.

        Raises:
            ArgumentError: this process does not belong to a group, or is one of several and none was initialised.
        """
        ranks = _group_of(process_group)
        return cls(ranks, ranks if expert_process_group is None else _group_of(expert_process_group))


def messages_of(process_group: Any) -> Group:
    """Group over which the ranks of a process group send each other messages, with its timeout."""
    if isinstance(process_group, GroupOfRanks):
        return process_group.group
    if process_group.size() == 1:
        return SOLO
    return TorchGroup(process_group)


def _group_of(process_group: Any) -> Any:
    if process_group is None:
        check_initialized("process_group")
        is_alone = not (dist.is_available() and dist.is_initialized())
        return GroupOfRanks() if is_alone else dist.group.WORLD
    if isinstance(process_group, int):  # torch gives a number to ranks that are not members
        raise ArgumentError(f"process_group: this process must belong to it, but rank {dist.get_rank()} does not")
    size = getattr(process_group, "size", None)
    if not (callable(size) or isinstance(size, int)):
        raise ArgumentError(f"process_group must be one of torch or a Group, but is of {type(process_group).__name__}")
    return process_group if callable(size) else GroupOfRanks(process_group)


logger = logging.getLogger(__name__)


def describe_options(config: ReductionOptions, **more: Any) -> list[str]:
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
    pairs = group.all_gather([digest_of(list(lines)), digest_of(list(may_differ))])
    difference = find_difference(group, [digest for digest, _ in pairs], list(lines), absent="no further parameter")
    if difference is not None:
        raise CollectiveError(f"model and options must be the same on every rank, but {difference}")
    return len({digest for _, digest in pairs}) == 1


def connect(
    process_group: Any, group: Group, buffers: Sequence[_ParamAndGradBuffer], config: ReductionOptions
) -> Collectives:
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
        raise CollectiveError(
            f"collectives: ranks must share memory, but {why or 'the option is torch, and there is no process group'}"
        )
    if why is not None:
        logger.info("gradients are reduced by torch, because %s", why)
    device = buffers[0].grad_data.device if buffers else None
    # Not counted by each rank for itself: a constructor that fails may have come further on some of them.
    user = max(group.all_gather(_num_users.get(process_group, 0))) + 1
    _num_users[process_group] = user
    return TorchCollectives(
        process_group, fp32_accumulation=config.reduce_scatter_with_fp32_accumulation, device=device, user=user
    )


_num_users: "Final[WeakKeyDictionary[Any, int]]" = WeakKeyDictionary()
"""Number of collectives that were made for a process group of torch."""


def _why_not_shared(buffers: Sequence[_ParamAndGradBuffer], config: ReductionOptions) -> str | None:
    """Reason why buffers cannot be reduced in shared memory; None if they can."""
    if config.num_distributed_optimizer_instances > 1:
        return "the optimizer has several instances"
    for buffer in buffers:
        if buffer.grad_data.device != torch.device("cpu"):
            return f"gradients lie on {buffer.grad_data.device}"
        if buffer.grad_dtype not in SUMMABLE:
            return f"gradients have the type {buffer.grad_dtype}"
    return None


@dataclass(frozen=True, slots=True)
class InitialValues:
    """Parameters and buffers of a model that the same ranks have, each with its name."""

    params: list[tuple[str, torch.Tensor]]
    buffers: list[tuple[str, torch.Tensor]]

    def describe_buffers(self) -> list[str]:
        """One line for each buffer, which all ranks must have alike."""
        return [
            f"buffer {name!r} of shape {list(value.shape)}, {value.dtype}, on {value.device.type}{_layout_of(value)}"
            for name, value in self.buffers
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values: parameters first."""
        yield from self.params
        yield from self.buffers


def is_dense(value: torch.Tensor) -> bool:
    """True for a tensor whose elements collectives can send: neither sparse, nested nor quantized."""
    return value.layout is torch.strided and not value.is_nested and not value.is_quantized


def _layout_of(value: torch.Tensor) -> str:
    return "" if is_dense(value) else f", {value.layout}"


def values_of(module: torch.nn.Module, *, of_experts: bool) -> InitialValues:
    """Values of the experts of a model, or all others.

    A buffer belongs to the experts if all parameters of its module do. If the module has no parameters, the innermost
    module around it that has some decides.

    Args:
        module: model.
        of_experts: True for the values of experts.
    """
    params = [(name, param.detach()) for name, param in module.named_parameters() if is_expert(param) == of_experts]
    buffers = [
        (name, value.detach())
        for name, value in module.named_buffers()
        if value.device.type != "meta" and _is_of_experts(module, name) == of_experts
    ]
    return InitialValues(params, buffers)


def _is_of_experts(module: torch.nn.Module, name: str) -> bool:
    """True if a buffer belongs to experts alone."""
    place = name.rpartition(".")[0]
    while True:
        params = list(module.get_submodule(place).parameters())
        if params or not place:
            return bool(params) and all(map(is_expert, params))
        place = place.rpartition(".")[0]


def broadcast_values(values: Iterable[tuple[str, torch.Tensor]], collectives: Collectives, waiter: Waiter) -> None:
    """Collective over the ranks: replaces dense values by those of the first rank.

    Args:
        values: names and tensors, of the same shapes and types on all ranks.
        collectives: collectives of the ranks.
        waiter: waits.
    """
    dense = [value for _, value in values if is_dense(value) and value.numel()]
    if not dense or collectives.size() == 1:
        return
    # Collectives would wait for tensors with gaps without a look at the other ranks.
    received = [value if _is_sent_as_it_is(value) else _contiguous(value) for value in dense]
    waiter.wait(collectives.broadcast(received, source=0), "broadcast of parameters and buffers")
    for value, new in zip(dense, received, strict=True):
        if new is not value:
            _write(value, new)


def _contiguous(value: torch.Tensor) -> torch.Tensor:
    return value.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _is_sent_as_it_is(value: torch.Tensor) -> bool:
    return value.is_contiguous() and not _overlaps(value) and not value.is_conj() and not value.is_neg()


def _overlaps(value: torch.Tensor) -> bool:
    """True if elements share memory, as `expand` makes them."""
    return any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _write(value: torch.Tensor, new: torch.Tensor) -> None:
    """Copies a tensor to another one, writing elements that share memory once."""
    target, source = value, new
    for dim, stride in enumerate(value.stride()):
        if stride == 0 and value.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    if _overlaps(value) and not torch.equal(value, new):
        raise GradientError(
            f"a tensor of shape {list(value.shape)} has elements in a single memory location, which differ on rank 0"
        )


def compare_values(values: Sequence[tuple[str, torch.Tensor]], group: Group) -> None:
    """Collective over the ranks: checks that all have the same values, by digests that are made where they lie."""
    if group.size == 1:
        return
    value_digests = {name: f"{tensor_digest(value):016x}" for name, value in values}
    difference = find_difference(group, group.all_gather(digest_of(value_digests)), value_digests)
    if difference is not None:
        raise CollectiveError(
            f"all ranks must begin with the same values, but {difference.field} of rank {difference.rank} differs from "
            f"that of rank {difference.usual_rank}: load the same state on all ranks before wrapping the model, or "
            "leave broadcast=False out, so that dense values of rank 0 are copied"
        )
