"""Methods of Megatron Core's classes that are not called here, so that overriding them would change nothing."""

from functools import cache
from typing import Any, Final

from trackbed.errors import ArgumentError

__all__ = ["check_overrides", "first_override", "is_ours"]

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
    found = first_override(cls, names)
    if found:
        msg = f"{found} must not be overridden, because it is never called: {advice}"
        raise ArgumentError(msg)


def is_ours(what: Any) -> bool:
    """True for a class or a function of Trackbed."""
    return str(getattr(what, "__module__", "")).partition(".")[0] == _OURS


@cache
def first_override(cls: Any, names: tuple[str, ...]) -> str:
    """Name of the first of these methods that a class does not have from ours; empty if there is none."""
    for name in names:
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is not None and not is_ours(owner):
            return f"{owner.__name__}.{name}"
    return ""
