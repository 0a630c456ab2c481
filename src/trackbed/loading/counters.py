"""Counters of a loader: batches, samples, tokens and stalls.

Shapes: K datasets of a blend.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["LoaderCounters"]


@dataclass(slots=True)
class LoaderCounters:
    """Totals since the loader was created."""

    batches: int = 0
    """Batches returned."""
    samples: int = 0
    """Samples in the returned batches."""
    stall_seconds: float = 0.0
    """Total time spent waiting for batches."""
    last_stall_seconds: float = 0.0
    """Time spent waiting for the last batch."""
    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """`[K]` returned tokens of each dataset of a blend, or of the single dataset. Includes padding."""
