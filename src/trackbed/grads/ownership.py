"""Which wrapper has a parameter: one model is wrapped once at a time."""

import gc
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from trackbed.errors import ArgumentError

__all__ = ["Owner", "check_unclaimed", "claim"]

Parameter = torch.nn.Parameter


class Owner(ABC):
    """What has the parameters of a wrapped model."""

    module: torch.nn.Module
    params: list[Parameter]
    """Parameters that require a gradient."""
    is_released: bool
    """True if another wrapper has taken the model over."""

    @abstractmethod
    def has_begun(self) -> bool:
        """True if the wrapper was used."""

    @abstractmethod
    def release(self, param: Parameter) -> None:
        """Lets go of the model, of which another wrapper takes over a parameter."""


_OWNERS: Final = WeakIdKeyDictionary()
"""Weak reference to the owner of each parameter."""


def check_unclaimed(named: Iterable[tuple[str, Parameter]], members: Iterable[Parameter]) -> None:
    """Checks that no other wrapper is about to train some of the parameters together with others.

    A model may be wrapped again, and a wrapper that was used may give up its place to one of another model. But two
    new wrappers with a parameter in common are meant to be used together, and one of them would be refused later.

    Args:
        named: names and parameters to be claimed.
        members: all parameters of the model.

    Raises:
        ArgumentError: one is; the message has the first parameter in common.
    """
    found = _first_in_common(named, set(members))
    if found is not None:
        gc.collect()  # a wrapper that only waits for the collector is none
        found = _first_in_common(named, set(members))
    if found is not None:
        msg = (
            f"module: a parameter must have one wrapper, but {found} is in another DistributedDataParallel, with "
            "parameters that this model lacks: wrap one module that has all of them"
        )
        raise ArgumentError(msg)


def claim(params: Iterable[Parameter], owner: Owner) -> None:
    """Makes an object the owner of parameters, after the one that had them has let go of them."""
    for param in params:
        before = _owner_of(param)
        if before is not None and before is not owner:
            before.release(param)
        _OWNERS[param] = weakref.ref(owner)


def _first_in_common(named: Iterable[tuple[str, Parameter]], members: set[Parameter]) -> str | None:
    """Name of the first parameter of a wrapper that was not used, and has parameters besides; None if there is none."""
    for name, param in named:
        owner = _owner_of(param)
        if owner is None or owner.has_begun():
            continue
        present = set(
            owner.module.parameters()
        )  # without those that were replaced, after which a model is wrapped again
        if any(other in present and other not in members for other in owner.params):
            return name
    return None


def _owner_of(param: Parameter) -> Owner | None:
    owner: Owner | None = _OWNERS.get(param, lambda: None)()  # type: ignore[no-untyped-call]
    return owner
