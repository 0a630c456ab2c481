"""The order "balanced" of a blend: exact shares, shuffled as a whole.

The order depends only on counts and seed, so its index can be built before the datasets that it draws from.

Shapes: K datasets, N samples, B positions.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from trackbed.cache import Allocate, Arrays, ArraySpec, Entry, Kind, Request, fingerprint
from trackbed.datasets.blend.order import ARRAYS, IndexedOrder, own_decisions
from trackbed.index.balanced import BALANCED_VERSION, balanced_blend, balanced_dtypes, largest_remainders
from trackbed.kernels import available_threads

_KIND: Final = Kind(is_blend=True)
_DRAW_COST: Final = 10.0
"""Nanoseconds per sample, writing included."""


class BalancedOrder(IndexedOrder):
    """Order with exact shares, shuffled as a whole. See `BlendOrder`."""

    id_dtype: Final = torch.int64

    @cached_property
    def counts(self) -> list[int]:
        """`[K]` number of samples drawn from each dataset."""
        weights, size = self.spec.weights, self.spec.size
        return [int(weight) for weight in weights] if size is None else largest_remainders(weights, size)

    def check(self) -> None:
        """Raises OversampleError if the blend draws more samples from a dataset than it has."""
        self.spec.check_draws(self.counts)

    def decisions(self) -> dict[str, Any]:
        """Returns everything that decides the order, besides datasets, weights and size."""
        return own_decisions(self.spec.config)

    def request(self, entry: Callable[[], Entry | None]) -> Request | None:
        """Returns the request for the index, or None if it is kept in memory."""
        directory = self.spec.config.path_to_cache
        if directory is None:
            return None
        total = sum(self.counts)
        built_entry = Entry(
            directory=Path(directory),
            stem="balanced",
            description=f"{total} samples of {len(self.counts)} datasets in the balanced order",
            arrays=ARRAYS,
            decisions={
                "order": "balanced",
                "version": BALANCED_VERSION,
                "num_datasets": len(self.counts),
                "counts": fingerprint({"all": self.counts}),
                "random_seed": int(self.spec.config.random_seed),
            },
            megatron=False,
        )
        return Request(built_entry, _KIND, self)

    def expected(self) -> Mapping[str, ArraySpec]:
        """Returns dtypes and shapes of the two arrays."""
        shape = (sum(self.counts),)
        dtypes = balanced_dtypes(self.counts)
        return {name: ArraySpec(np.dtype(dtype), shape) for name, dtype in zip(ARRAYS, dtypes, strict=True)}

    def cost(self) -> float:
        """Estimates the nanoseconds to build the two arrays."""
        return _DRAW_COST * len(self)

    def build(self, allocate: Allocate) -> Arrays:
        """Builds the two arrays."""
        arrays = balanced_blend(
            self.counts,
            seed=self.spec.config.random_seed,
            num_threads=available_threads(),
            allocate=allocate,
            poll=lambda done: allocate.filled(done, *ARRAYS),
        )
        return dict(zip(ARRAYS, arrays, strict=True))
