"""Whether this process was forked from one that had loaded a library for object stores.

obstore hangs or crashes in such a process, whose runtime has lost its threads.
"""

import os
import sys
from typing import Final

__all__ = ["is_forked"]

_LIBRARIES: Final = ("obstore", "multistorageclient")
_state = {"is_forked": False}


def is_forked() -> bool:
    """True if requests must be made by a helper program."""
    return _state["is_forked"]


def _after_fork() -> None:
    _state["is_forked"] = is_forked() or any(name in sys.modules for name in _LIBRARIES)


os.register_at_fork(after_in_child=_after_fork)
