"""Values with which all ranks begin: those of rank 0, or ones that are compared."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from trackbed.comm import Group
from trackbed.comm.tensor_digest import tensor_digest
from trackbed.errors import CollectiveError, GradientError
from trackbed.grads.collectives import Collectives
from trackbed.grads.failure_aware_wait import Waiter
from trackbed.grads.parameters import is_expert

__all__ = ["InitialValues", "broadcast_values", "compare_values", "is_dense", "values_of"]


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

    A buffer belongs to the experts if all parameters of its module do, or, where that has none, those of the innermost
    module around it that has some.

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

    Raises:
        CollectiveError: another rank failed.
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
    """Copies a tensor to another one, writing elements that share memory once.

    Raises:
        GradientError: such elements would differ.
    """
    target, source = value, new
    for dim, stride in enumerate(value.stride()):
        if stride == 0 and value.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    if _overlaps(value) and not torch.equal(value, new):
        msg = f"a tensor of shape {list(value.shape)} has elements in a single memory location, which differ on rank 0"
        raise GradientError(msg)


def compare_values(values: Sequence[tuple[str, torch.Tensor]], group: Group) -> None:
    """Collective over the ranks: checks that all have the same values, by digests that are made where they lie.

    Raises:
        CollectiveError: they do not; names the first parameter or buffer that differs.
    """
    if group.size == 1:
        return
    own = [f"{tensor_digest(value):016x}" for _, value in values]
    digests = group.all_gather(hashlib.sha256("".join(own).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    of_ranks = group.all_gather(own if group.rank in (0, other) else None)
    pairs = enumerate(zip(of_ranks[0], of_ranks[other], strict=True))
    number = next(number for number, (first, second) in pairs if first != second)
    msg = (
        f"all ranks must begin with the same values, but {values[number][0]} of rank {other} differs from that of rank "
        "0: load the same state on all ranks before wrapping the model, or leave broadcast=False out, so that dense "
        "values of rank 0 are copied"
    )
    raise CollectiveError(msg)
