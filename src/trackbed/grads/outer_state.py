"""State of a module around a wrapper, in which the wrapped model has the names of the model itself."""

from collections.abc import Collection
from typing import Any

__all__ = ["add_metadata_of_module", "restore_names"]


def restore_names(state: dict[str, Any], prefix: str, names: Collection[str]) -> None:
    """Puts `module.` before the names of a wrapped model, under which torch looks for them.

    Names that have it already, as in a state of torch's wrapper, stay.

    Args:
        state: state of a module around the wrapper, which is changed.
        prefix: name of the wrapper in that module, with a dot.
        names: names in the state of the model.

    >>> state = {"net.weight": 1, "net.module.bias": 2, "head.weight": 3}
    >>> restore_names(state, "net.", {"weight", "bias"})
    >>> state
    {'head.weight': 3, 'net.module.weight': 1, 'net.module.bias': 2}
    """
    own = [key for key in state if key.startswith(prefix)]
    values = {key.removeprefix(prefix): state.pop(key) for key in own}
    # A model may have a part of its own that is called `module`.
    has_prefix = not set(names).issuperset(values) and all(
        name.startswith("module.") and name.removeprefix("module.") in names for name in values
    )
    for name, value in values.items():
        is_inner = not has_prefix and (name in names or not name.startswith("module."))
        state[f"{prefix}module.{name}" if is_inner else prefix + name] = value


def add_metadata_of_module(state: Any, prefix: str) -> None:
    """Adds the versions of a wrapped model's modules under the names that they have in a module around the wrapper.

    Args:
        state: state of that module, whose `_metadata` is changed.
        prefix: name of the wrapper in it, with a dot; nothing is added if it is empty.
    """
    metadata = getattr(state, "_metadata", None)
    if not prefix or metadata is None:
        return
    name = prefix.removesuffix(".")
    for key in [key for key in metadata if key == name or key.startswith(prefix)]:
        metadata.setdefault(f"{prefix}module{key.removeprefix(name)}", metadata[key])
