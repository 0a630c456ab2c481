"""Check that tensors of a model do not share memory, where one of them is updated apart from the others."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations, pairwise
from typing import NamedTuple

import torch

from trackbed.errors import ArgumentError

__all__ = ["check_separate"]


class _Placed(NamedTuple):
    """Tensor and its place in its storage."""

    start: int
    """First byte."""
    stop: int
    """Byte after the last one."""
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
    storages: defaultdict[tuple[torch.device, int], list[_Placed]] = defaultdict(list)
    for tensors, is_moved in ((moved, True), (others, False)):
        for name, tensor in tensors:
            if _has_memory(tensor):
                key = (tensor.device, tensor.untyped_storage().data_ptr())
                storages[key].append(_place(name, tensor, is_moved=is_moved))
    for placed in storages.values():
        placed.sort(key=lambda one: (one.start, one.stop))
        if all(one.stop <= following.start for one, following in pairwise(placed)):
            continue
        for one, other in combinations(placed, 2):
            if (one.is_moved or other.is_moved) and _share_an_element(one, other):
                msg = (
                    f"{other.name} must have memory of its own where the optimizer is sharded or updates copies, but "
                    f"shares some with {one.name}: give the model one parameter under both names to tie them"
                )
                raise ArgumentError(msg)


def _has_memory(tensor: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    return tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() != 0


def _place(name: str, tensor: torch.Tensor, *, is_moved: bool) -> _Placed:
    start = int(tensor.storage_offset())
    stop = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    size = tensor.element_size()
    return _Placed(start * size, stop * size, name, tensor, is_moved)


def _share_an_element(one: _Placed, other: _Placed) -> bool:
    """True if two tensors of one storage do; for different types, if their ranges of bytes intersect."""
    start, stop = min(one.start, other.start), max(one.stop, other.stop)
    if one.stop <= other.start or other.stop <= one.start:
        return False
    size = one.tensor.element_size()
    if other.tensor.element_size() != size:
        return True
    is_used = torch.zeros((stop - start) // size, dtype=torch.bool)
    views = [
        is_used.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - start // size)
        for tensor in (one.tensor, other.tensor)
    ]
    views[0].fill_(1)
    return bool(views[1].any())
