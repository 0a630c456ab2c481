"""Methods of Megatron Core's classes that are not called here, so that overriding them would change nothing."""

from functools import cache
from typing import Any, Final

from trackbed.errors import ArgumentError

__all__ = ["check_overrides"]

_OURS: Final = __name__.partition(".")[0]


def check_overrides(cls: type, *names: str, advice: str) -> None:
    """Checks that a class derived from one of ours defines none of some methods.

    Args:
        cls: class of an object that is being made.
        names: names of the methods.
        advice: what to do instead, for the error.

    Raises:
        ArgumentError: it defines one; the message names it.
    """
    found = _first_override(cls, names)
    if found:
        msg = f"{found} must not be overridden, because it is never called: {advice}"
        raise ArgumentError(msg)


@cache
def _first_override(cls: Any, names: tuple[str, ...]) -> str:
    """Name of the first of these methods that a class has from others; empty if there is none."""
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == _OURS:
            continue
        for name in names:
            if name in vars(base):
                return f"{base.__name__}.{name}"
    return ""
