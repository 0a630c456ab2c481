"""Methods of Megatron Core's classes that are not called here, so that overriding them would change nothing."""

from pathlib import Path
from typing import Any, Final

from trackbed.errors import ArgumentError

_OURS: Final = __name__.partition(".")[0]
_FOLDER: Final = str(Path(__file__).parents[1])


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
        raise ArgumentError(f"{found} must not be overridden, because it is never called: {advice}")


def is_ours(what: Any) -> bool:
    """True for a class of Trackbed, or a function whose code is Trackbed's."""
    if isinstance(what, type):
        return what.__module__.partition(".")[0] == _OURS
    code = getattr(what, "__code__", None)
    return code is not None and code.co_filename.startswith(_FOLDER)


def is_overridden(dataset: object, names: tuple[str, ...]) -> bool:
    """True if one of these methods is not ours: in the class of a dataset, or as an attribute of its own."""
    cls, own = type(dataset), vars(dataset)
    if cls.__getattribute__ is not object.__getattribute__:
        return True
    return any(name in own or not is_ours(getattr(cls, name)) for name in names)


def first_override(cls: type, names: tuple[str, ...]) -> str:
    """Name of the first of these methods that a class has, and not from ours; empty if there is none."""
    for name in names:
        if hasattr(cls, name) and not is_ours(getattr(cls, name)):
            owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
            return f"{owner.__name__}.{name}"
    return ""
