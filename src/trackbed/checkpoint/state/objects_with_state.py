"""Objects in a state that give and take a state of their own, such as modules, optimizers and data loaders.

`torch.distributed.checkpoint` calls them `Stateful`: `state_dict()` is called for a save and, so that there are tensors
to fill, for a load; `load_state_dict()` after all has been read. Here they may lie at any depth.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from trackbed.checkpoint.state.partial_tensors import printable
from trackbed.errors import CheckpointError


class OwnState(NamedTuple):
    """Object in a state, and its path there."""

    path: tuple[Any, ...]
    owner: Any
    state: Any = None
    """The state that it had before."""

    def __str__(self) -> str:
        """Path and class, for errors."""
        return f"{'.'.join(map(printable, self.path))}, of {type(self.owner).__name__}"


def has_own_state(value: Any) -> bool:
    """True for an object whose class has the methods `state_dict` and `load_state_dict`."""
    return all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict"))


_NOTHING: Final = object()
REFUSAL: Final = "_trackbed_refusal"
"""Attribute with the reason why the state of an object is no state of all ranks, and what to save instead."""


def state_of(owner: OwnState) -> Any:
    """Returns the state of an object.

    Raises:
        CheckpointError: its `state_dict()` failed, or is that of one rank alone; names its place.
    """
    refusal = getattr(owner.owner, REFUSAL, None)
    if refusal is not None:
        raise CheckpointError(f"{owner}: {refusal}")
    return _call(owner, "state_dict")


def give_states(loaded: dict[str, Any], owners: Sequence[OwnState], *, may_lack: bool) -> None:
    """Gives objects what was loaded for them, in the order of their paths, and puts them in its place.

    Args:
        loaded: loaded state, which is changed.
        owners: the objects.
        may_lack: True to leave objects alone for which there is nothing; otherwise that is an error.

    Raises:
        CheckpointError: there is nothing for an object, or its `load_state_dict()` failed; names its place.
    """
    for owner in sorted(owners, key=lambda one: list(map(str, one.path))):
        *above, last = owner.path
        container: Any = loaded
        for key in above:
            container = _below(container, key)
        found = _below(container, last)
        if found is not _NOTHING:
            _call(owner, "load_state_dict", with_versions(found, owner.state))
            container[last] = owner.owner
        elif not may_lack:
            raise CheckpointError(f"{owner}: its state must be in the checkpoint, but is not there")


def with_versions(loaded: Any, own: Any) -> Any:
    """A loaded state of a module with `_metadata`, the versions of its classes: its own where none are stored."""
    versions = getattr(own, "_metadata", None)
    if versions is None or not isinstance(loaded, dict) or hasattr(loaded, "_metadata"):
        return loaded
    state = OrderedDict(loaded)
    vars(state)["_metadata"] = versions
    return state


def _below(container: Any, key: Any) -> Any:
    """Value of a container under a key; `_NOTHING` if there is none."""
    if isinstance(container, dict):
        return container.get(key, _NOTHING)
    return container[key] if isinstance(container, list) and key < len(container) else _NOTHING


def _call(owner: OwnState, name: str, *arguments: Any) -> Any:
    try:
        return getattr(owner.owner, name)(*arguments)
    except Exception as error:
        raise CheckpointError(f"{owner}: {name}() failed, {type(error).__name__}: {error}{_hint(owner)}") from error


def _hint(owner: OwnState) -> str:
    """Advice about an optimizer of torch that could not be loaded; empty for other objects."""
    if not isinstance(owner.owner, torch.optim.Optimizer):
        return ""
    return (
        ": an optimizer takes the state of one with the same parameters, and has tensors to fill only after a step; "
        "trackbed.sharded_state(model, optimizer) and load_sharded_state need none"
    )
