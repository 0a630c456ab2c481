"""Processes as a value: whoever works with others is told with whom."""

from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["SOLO", "Group", "Solo"]


class Group(Protocol):
    """Some processes, of which this is one."""

    @property
    def rank(self) -> int:
        """Number of this process, in `[0, size)`."""
        ...

    @property
    def size(self) -> int:
        """How many processes there are, at least 1."""
        ...


@dataclass(frozen=True, slots=True)
class Solo:
    """One process on its own."""

    rank: int = 0
    size: int = 1


SOLO: Final = Solo()
