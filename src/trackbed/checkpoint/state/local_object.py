"""Values that a checkpoint does not contain."""

from dataclasses import dataclass
from typing import Any

__all__ = ["LocalNonpersistentObject"]


@dataclass(eq=False)
class LocalNonpersistentObject:
    """Value that is not saved; `load` returns the one of the state dictionary that it was given.

    Args:
        obj: value.
    """

    obj: Any

    def unwrap(self) -> Any:
        """Returns the value."""
        return self.obj
