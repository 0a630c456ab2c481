"""The indices of a blend in the balanced order, and where they are kept.

They follow from counts and seed alone, so that they can be made before the datasets that they draw from.

Shapes: K datasets, N samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from trackbed.cache import Allocate, Arrays, ArraySpec, Entry, OneByOne, Request, fingerprint, in_memory
from trackbed.cancellation import Poll
from trackbed.index.balanced import BALANCED_VERSION, balanced_blend, balanced_dtypes, largest_remainders
from trackbed.kernels import available_threads

__all__ = ["BalancedIndices"]

_DRAW_COST: Final = 10.0
_ARRAYS: Final = ("dataset_index", "dataset_sample_index")


@dataclass(frozen=True)
class BalancedIndices:
    """The indices that these arguments decide.

    Args:
        weights: `[K]` shares if `size` is given, else how many samples each dataset gives.
        size: N, or None to take as many samples as the weights say.
        seed: of the shuffle.
        directory: folder of the cache; None to keep the indices in memory.
    """

    weights: Sequence[float]
    size: int | None
    seed: int
    directory: str | None

    @cached_property
    def counts(self) -> list[int]:
        """`[K]` samples that each dataset gives.

        Raises:
            ArgumentError: the weights are no shares.
        """
        if self.size is None:
            return [int(weight) for weight in self.weights]
        return largest_remainders(self.weights, self.size)

    def entry(self) -> Entry | None:
        """Where they are kept, or None."""
        if self.directory is None:
            return None
        decisions = {
            "order": "balanced",
            "version": BALANCED_VERSION,
            "num_datasets": len(self.counts),
            "counts": fingerprint({"all": self.counts}),
            "random_seed": int(self.seed),
        }
        return Entry(
            directory=Path(self.directory),
            stem="balanced",
            description=f"{sum(self.counts)} samples of {len(self.counts)} datasets in the balanced order",
            arrays=_ARRAYS,
            decisions=decisions,
            megatron=False,
        )

    def expected(self) -> Mapping[str, ArraySpec]:
        """Types and shapes of the two arrays."""
        ids, samples = balanced_dtypes(self.counts)
        shape = (sum(self.counts),)
        return {
            "dataset_index": ArraySpec(np.dtype(ids), shape),
            "dataset_sample_index": ArraySpec(np.dtype(samples), shape),
        }

    def request(self) -> Request | None:
        """Returns the request for the two arrays; None if they are kept in memory."""
        entry = self.entry()
        if entry is None:
            return None
        return Request(entry, _KIND, self, cost=_DRAW_COST * sum(self.counts))

    def build(self, allocate: Allocate = in_memory, *, poll: Poll = None) -> Arrays:
        """Returns the two arrays, built now.

        Args:
            allocate: gives arrays to fill.
            poll: called with the number of samples that are done.
        """

        def report(done: int) -> None:
            allocate.filled(done, *_ARRAYS)
            if poll is not None:
                poll(done)

        made = balanced_blend(
            self.counts, seed=self.seed, num_threads=available_threads(), allocate=allocate, poll=report
        )
        return dict(zip(_ARRAYS, made, strict=True))


_KIND: Final = OneByOne(BalancedIndices.build, BalancedIndices.expected, is_blend=True)
