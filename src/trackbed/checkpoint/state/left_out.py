"""Stored tensors below empty dictionaries of a state, which would have to ask for them. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any


def below_empty(keys: Iterable[str], state: Mapping[str, Any]) -> list[str]:
    """Keys of stored tensors for whose place a state has an empty dictionary, sorted.

    Such as the moments of an optimizer that had made no step when its `state_dict()` was given to `load`.

    Args:
        keys: keys of tensors that are not asked for.
        state: state that is loaded.

    >>> below_empty(["optim.state.0.exp_avg", "model.weight"], {"optim": {"state": {}}, "model": {"bias": 1}})
    ['optim.state.0.exp_avg']
    """
    return sorted(key for key in keys if _is_below_empty(key, state))


def _is_below_empty(key: str, found: Any) -> bool:
    for name in key.split("."):
        if not isinstance(found, Mapping):
            return False
        if not found:
            return True
        found = found.get(name)
    return False
