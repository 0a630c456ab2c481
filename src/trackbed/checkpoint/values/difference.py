"""Comparison of a plain value with what was read back."""

from argparse import Namespace
from collections import deque
from collections.abc import Iterable
from enum import Enum
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch

from trackbed.checkpoint.state.partial_tensors import printable

_ATOMS: Final = (str, bytes, bytearray, int, float, complex)


def first_difference(saved: Any, loaded: Any) -> str | None:
    """Place of the first difference in value or class; None if there is none, and empty if it is at the top.

    Containers, numbers, text and enums are compared. Tensors, arrays and objects of other classes are taken to be what
    their classes make of themselves.
    """
    return _difference(saved, loaded, "", set())


def _difference(saved: Any, loaded: Any, place: str, seen: set[int]) -> str | None:
    if isinstance(saved, torch.Tensor | np.ndarray):
        return None
    if type(saved) is not type(loaded):
        return place
    if id(saved) in seen:
        return None
    if isinstance(saved, Enum):
        return None if saved is loaded else place
    if isinstance(saved, _ATOMS):
        return None if saved == loaded or (saved != saved and loaded != loaded) else place
    if isinstance(saved, set | frozenset):
        is_same = saved == loaded or sorted(map(repr, saved)) == sorted(map(repr, loaded))  # NaN equals nothing
        return None if is_same else place
    if isinstance(saved, Namespace | SimpleNamespace):
        saved, loaded = vars(saved), vars(loaded)
    if not isinstance(saved, dict | list | tuple | deque):
        return None
    if len(saved) != len(loaded):
        return place
    seen.add(id(saved))
    pairs: Iterable[tuple[Any, Any, Any]]
    if isinstance(saved, dict):
        # Keys are compared in their order, which a pickle keeps.
        keys = _difference(list(saved), list(loaded), place, seen)
        if keys is not None:
            return keys
        pairs = ((key, one, other) for (key, one), other in zip(saved.items(), loaded.values(), strict=True))
    else:
        pairs = ((number, one, other) for number, (one, other) in enumerate(zip(saved, loaded, strict=True)))
    for name, one, other in pairs:
        found = _difference(one, other, f"{place}.{printable(name)}" if place else printable(name), seen)
        if found is not None:
            return found
    return None
