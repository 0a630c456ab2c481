"""Copies of whole states for `torch.distributed.checkpoint.async_save`, in slabs that later saves use again."""

import os
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, Final

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from trackbed.checkpoint.background.slab import Slab
from trackbed.checkpoint.state.divided_tensors import is_divided

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


class SlabPool:
    """Slabs, each of which is used again once nothing refers to the copies in it."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        """Begins without slabs: a forked process leaves those of its parent alone."""
        self._lock = Lock()
        self._slabs: list[Slab] = []

    def copies_of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors into a slab that is free.

        Raises:
            CheckpointError: there is not enough memory.
        """
        with self._lock:
            slab = next((one for one in self._slabs if not one.is_in_use), None)
            if slab is None:
                slab = Slab()
                self._slabs.append(slab)
            return [copy for copy in slab.copies_of(tensors) if isinstance(copy, torch.Tensor)]


def staged(state: dict[str, Any], pool: SlabPool) -> dict[str, Any]:
    """Returns a state whose tensors are copies on the CPU; those in one memory have one copy.

    Args:
        state: nested dictionaries, lists and tuples; anything else in it is copied as torch's stager does.
        pool: memory for the copies.
    """
    places: dict[Any, int] = {}
    tensors: list[torch.Tensor] = []

    def note(value: torch.Tensor) -> int:
        memory = value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride()
        key = (*memory, value.dtype, value.is_conj(), value.is_neg())
        if key not in places:
            places[key] = len(tensors)
            tensors.append(value.detach())
        return places[key]

    def describe(value: Any) -> Any:
        if is_divided(value) and _can_be_copied(value._local_tensor):
            return _Divided(value, note(value._local_tensor))
        if type(value) in _PLAIN and _can_be_copied(value):
            return _Place(note(value))
        return _Other(value)

    described = _mapped(describe, state)
    copies = pool.copies_of(tensors)
    stager = StateDictStager()
    found: dict[str, Any] = _mapped(lambda leaf: leaf.value(copies, stager), described)
    return found


class _Place:
    """A plain tensor."""

    def __init__(self, number: int) -> None:
        self._number = number

    def value(self, copies: list[torch.Tensor], _: StateDictStager) -> torch.Tensor:
        return copies[self._number]


class _Divided:
    """A `DTensor`, by its local part."""

    def __init__(self, tensor: Any, number: int) -> None:
        self._tensor, self._number = tensor, number

    def value(self, copies: list[torch.Tensor], _: StateDictStager) -> Any:
        from torch.distributed.tensor import DTensor

        own = self._tensor
        return DTensor.from_local(
            copies[self._number],
            own.device_mesh,
            own.placements,
            run_check=False,
            shape=own.shape,
            stride=own.stride(),
        )


class _Other:
    """Any other value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def value(self, _: list[torch.Tensor], stager: StateDictStager) -> Any:
        return stager.stage({"value": self._value})["value"]


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to the leaves of nested containers, which are made anew."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _mapped(function, one)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value)(_mapped(function, one) for one in value)
    return function(value)


def _can_be_copied(value: torch.Tensor) -> bool:
    """True for a tensor of elements that lie somewhere, and nothing else."""
    return value.layout is torch.strided and not value.is_quantized and not value.is_meta and not value.is_nested
