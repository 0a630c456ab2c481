"""Which wrapper has a parameter: one model is wrapped once at a time."""

import weakref
from collections.abc import Iterable
from typing import Final, Protocol

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Owner", "claim"]


class Owner(Protocol):
    """Wrapper of a model."""

    def release(self) -> None:
        """Lets go of the model, which another wrapper takes over."""
        ...


_OWNERS: Final = WeakIdKeyDictionary()
"""Weak reference to the owner of each parameter."""


def claim(params: Iterable[torch.nn.Parameter], owner: Owner) -> None:
    """Makes an object the owner of parameters, after the one that had them has let go of them."""
    for param in params:
        before = _OWNERS.get(param, lambda: None)()  # type: ignore[no-untyped-call]
        if before is not None and before is not owner:
            before.release()
        _OWNERS[param] = weakref.ref(owner)
