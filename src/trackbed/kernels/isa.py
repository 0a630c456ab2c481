"""Selection of the instruction level at which kernels run."""

import os
from typing import Final

from trackbed.errors import ArgumentError
from trackbed.kernels import _native

LEVELS: Final = ("baseline", "avx2", "avx512")


def available_levels() -> tuple[str, ...]:
    """Levels that this processor supports, narrowest first."""
    return LEVELS[: _native.best_isa() + 1]


def compiler() -> str:
    """Name and version of the compiler that has built the kernels, such as "GCC 12.2.0"."""
    return _native.compiler


def available_threads() -> int:
    """Number of CPUs available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def chosen_level() -> int:
    """Number of the level at which kernels run: the widest, or the one named by `TRACKBED_ISA`."""
    wanted = os.environ.get("TRACKBED_ISA", "")
    if not wanted:
        return _native.best_isa()
    if wanted not in available_levels():
        raise ArgumentError(
            f"TRACKBED_ISA must be one of {', '.join(available_levels())} on this processor, found {wanted!r}"
        )
    return LEVELS.index(wanted)
