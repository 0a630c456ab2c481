"""Names that a folder of inputs has and that are not read, with the reason."""

from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple

__all__ = ["LeftOut", "Reason", "is_hidden", "names_by_reason"]

_HIDDEN: Final = (".", "_")


class Reason(Enum):
    """Reason why a name is not read."""

    HIDDEN = "hidden"
    """Its name begins with `.` or `_`, as those of temporary files and of notes of other programs do."""
    GIVEN_TWICE = "given twice"
    """It is another name of a file or folder that is read."""
    UNKNOWN_SUFFIX = "unknown suffix"
    """Its suffix is not that of a format."""
    WRITTEN_BY_TRACKBED = "written by trackbed"
    """It belongs to a tokenised pair, or to an unfinished run."""


class LeftOut(NamedTuple):
    """A file, folder or object that is not read."""

    name: str
    """Path or address; that of a folder stands for all that is in it."""
    reason: Reason


def is_hidden(name: str) -> bool:
    """True for a name that is left out below a given folder, as Spark, Hive and pyarrow do.

    >>> is_hidden("_temporary"), is_hidden(".part-0.jsonl"), is_hidden("part-0.jsonl")
    (True, True, False)
    """
    return name.startswith(_HIDDEN)


def names_by_reason(found: Iterable[LeftOut]) -> dict[str, tuple[str, ...]]:
    """Returns the names that were left out for each reason; no key for a reason without names."""
    names: dict[str, list[str]] = {}
    for one in found:
        names.setdefault(one.reason.value, []).append(one.name)
    return {reason.value: tuple(names[reason.value]) for reason in Reason if reason.value in names}
