"""Check that tensors of a model do not share memory, where one of them is updated apart from the others."""

from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trackbed.errors import ArgumentError

__all__ = ["check_separate"]


class _Placed(NamedTuple):
    """Tensor and its place in memory."""

    device: str
    start: int
    """Address of the first byte."""
    stop: int
    """Address after the last one."""
    name: str
    tensor: torch.Tensor
    is_moved: bool


def check_separate(moved: Iterable[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Checks that no tensor that is moved to a buffer, or updated in a copy, shares an element with another tensor.

    Args:
        moved: tensors that are moved or copied, by name, each once.
        others: tensors of the same model that stay where they are.

    Raises:
        ArgumentError: one does; the message has both names.
    """
    placed = [
        _place(name, tensor, is_moved=is_moved)
        for tensors, is_moved in ((moved, True), (others, False))
        for name, tensor in tensors
        if _has_memory(tensor)
    ]
    for cluster in _clusters(placed):
        for one, other in combinations(cluster, 2):
            if (one.is_moved or other.is_moved) and _share_an_element(one, other):
                msg = (
                    f"{other.name} must have memory of its own where the optimizer is sharded or updates copies, but "
                    f"shares some with {one.name}: give the model one parameter under both names to tie them"
                )
                raise ArgumentError(msg)


def _has_memory(tensor: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.device.type != "meta"


def _place(name: str, tensor: torch.Tensor, *, is_moved: bool) -> _Placed:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return _Placed(str(tensor.device), start, start + reach * tensor.element_size(), name, tensor, is_moved)


def _clusters(placed: list[_Placed]) -> Iterator[list[_Placed]]:
    """Yields tensors whose ranges of bytes hang together."""
    cluster: list[_Placed] = []
    for one in sorted(placed, key=lambda one: one[:3]):
        if cluster and (one.device != cluster[0].device or one.start >= max(each.stop for each in cluster)):
            yield cluster
            cluster = []
        cluster.append(one)
    if cluster:
        yield cluster


def _share_an_element(one: _Placed, other: _Placed) -> bool:
    """True if two tensors do; where their elements do not lie alike, if their ranges of bytes intersect."""
    if one.stop <= other.start or other.stop <= one.start:
        return False
    start, stop = min(one.start, other.start), max(one.stop, other.stop)
    size = one.tensor.element_size()
    if other.tensor.element_size() != size or (one.start - other.start) % size:
        return True
    is_used = torch.zeros((stop - start) // size, dtype=torch.bool, device="cpu")
    views = [
        is_used.as_strided(each.tensor.shape, each.tensor.stride(), (each.start - start) // size)
        for each in (one, other)
    ]
    views[0].fill_(1)
    return bool(views[1].any())
