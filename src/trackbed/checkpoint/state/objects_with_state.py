"""Objects in a state that give and take a state of their own, such as modules, optimizers and data loaders.

`torch.distributed.checkpoint` calls them `Stateful`: `state_dict()` is called for a save and, so that there are tensors
to fill, for a load; `load_state_dict()` after all has been read. Here they may lie at any depth.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from trackbed.checkpoint.state.partial_tensors import printable
from trackbed.errors import CheckpointError


class OwnState(NamedTuple):
    """Object in a state, and its path there."""

    path: tuple[Any, ...]
    owner: Any

    def __str__(self) -> str:
        """Path and class, for errors."""
        return f"{'.'.join(map(printable, self.path))}, of {type(self.owner).__name__}"


def has_own_state(value: Any) -> bool:
    """True for an object whose class has the methods `state_dict` and `load_state_dict`."""
    return all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(owner: OwnState) -> Any:
    """Returns the state of an object.

    Raises:
        CheckpointError: its `state_dict()` failed; names its place.
    """
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
        if found is not None:
            _call(owner, "load_state_dict", found)
            container[last] = owner.owner
        elif not may_lack:
            raise CheckpointError(f"{owner}: its state must be in the checkpoint, but is not there")


def _below(container: Any, key: Any) -> Any:
    """Value of a container under a key; None if there is none."""
    if isinstance(container, dict):
        return container.get(key)
    return container[key] if isinstance(container, list) and key < len(container) else None


def _call(owner: OwnState, name: str, *arguments: Any) -> Any:
    try:
        return getattr(owner.owner, name)(*arguments)
    except Exception as error:
        raise CheckpointError(f"{owner}: {name}() failed, {type(error).__name__}: {error}") from error
