"""Errors for Megatron Core's arguments in calls of `save` and `load`, which say what takes their place."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from trackbed.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_MOST_POSITIONAL: Final = 2
"""The state and the folder."""
_MEGATRON_ARGUMENTS: Final = frozenset(
    (
        "async_sharded_save",
        "async_strategy",
        "checkpoint_dir",
        "common_strategy",
        "preprocess_common_before_consistancy_check",
        "process_group",
        "sharded_state_dict",
        "sharded_strategy",
        "validate_access_integrity",
        "verify_integrity",
    )
)
"""Arguments of Megatron Core 0.16.1 to 0.19 that `save` and `load` do not have."""


def refuses_megatron_arguments(own_names: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function so that an argument of Megatron Core's is an error that names the function which takes it.

    Other wrong arguments are Python's own TypeErrors.

    Args:
        own_names: for some of Megatron Core's arguments, how the decorated function writes the same.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__

        @wraps(function)
        def call(*arguments: P.args, **options: P.kwargs) -> R:
            others = sorted(_MEGATRON_ARGUMENTS & options.keys())
            if others or len(arguments) > _MOST_POSITIONAL:
                shown = [f"{other} (here {own_names[other]})" if other in own_names else other for other in others]
                if len(arguments) > _MOST_POSITIONAL:
                    shown.append(f"{len(arguments)} arguments without a name")
                raise ArgumentError(
                    f"{name}: takes a state and a folder, and arguments of its own by name, found "
                    f"{', '.join(shown)}: call trackbed.megatron.{name}, which has Megatron Core's arguments"
                )
            return function(*arguments, **options)

        return call

    return decorate
