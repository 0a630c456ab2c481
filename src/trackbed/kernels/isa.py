"""Which instruction level the kernels run at."""

import os
from typing import Final

from trackbed.errors import ArgumentError
from trackbed.kernels import _native

__all__ = ["LEVELS", "available_levels", "available_threads", "chosen_level"]

LEVELS: Final = ("baseline", "avx2", "avx512")


def available_levels() -> tuple[str, ...]:
    """The levels that this processor has, narrowest first."""
    return LEVELS[: _native.best_isa() + 1]


def available_threads() -> int:
    """How many threads this process can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chosen_level() -> int:
    """Number of the level that kernels run at: the widest, or the one that `TRACKBED_ISA` names.

    Raises:
        ArgumentError: `TRACKBED_ISA` names no level, or one that this processor lacks.
    """
    wanted = os.environ.get("TRACKBED_ISA", "")
    if not wanted:
        return _native.best_isa()
    if wanted not in available_levels():
        msg = f"TRACKBED_ISA must be one of {', '.join(available_levels())} on this processor, found {wanted!r}"
        raise ArgumentError(msg)
    return LEVELS.index(wanted)
