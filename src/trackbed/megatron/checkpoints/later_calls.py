"""Calls of save and load in the style of Megatron Core 0.17 to 0.19."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from trackbed.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_COMMON_STRATEGY: Final = 3
"""Position of the argument that 0.19 does not have any more."""
_WITHOUT_EFFECT: Final = ("async_strategy", "verify_integrity")


def takes_later_calls(num_positional: int, later: tuple[str, ...]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function with 0.16.1's signature to take later versions' calls too.

    From 0.19 on there is no `common_strategy`: a truth value in its place is `validate_access_integrity`. The names of
    implementations of asynchronous saves, and the hashes of whole files that 0.19 may compare, have no effect: all
    saves are made in one way, and whatever is read is compared with its checksum.

    Args:
        num_positional: number of arguments of 0.16.1 that may be given by position.
        later: names of the arguments that follow them in 0.17 or 0.19.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if len(arguments) > _COMMON_STRATEGY and isinstance(arguments[_COMMON_STRATEGY], bool):
                arguments = (*arguments[:_COMMON_STRATEGY], None, *arguments[_COMMON_STRATEGY:])
            if len(arguments) <= num_positional + len(later):
                options |= _by_name(dict(zip(later, arguments[num_positional:], strict=False)), options)
                arguments = arguments[:num_positional]
            return function(
                *arguments, **{name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
            )

        return call

    return decorate


def _by_name(found: Mapping[str, Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments that were given by position."""
    for name in found:
        if options.get(name) is not None:
            raise ArgumentError(f"{name}: must be given once, but is given twice")
    return found
