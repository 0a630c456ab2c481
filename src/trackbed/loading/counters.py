"""What a loader has handed out, and how long it was waited for.

Shapes: K datasets of a blend.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["LoaderCounters"]


@dataclass(slots=True)
class LoaderCounters:
    """Counts since a loader was made, for whoever logs them."""

    batches: int = 0
    """Batches handed out."""
    samples: int = 0
    """Samples in them."""
    stall_seconds: float = 0.0
    """Time that was waited for batches that were not there yet."""
    last_stall_seconds: float = 0.0
    """The part of it that the last batch took."""
    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """`[K]` tokens handed out of each dataset of a blend; of the one dataset otherwise. Padding counts."""
