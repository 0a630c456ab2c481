"""The order "megatron" of a blend: each sample is drawn from the dataset that is furthest behind its share.

Shapes: K datasets, N samples, B positions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from trackbed.cache import Allocate, Arrays, ArraySpec, Entry, Kind, Request, in_memory
from trackbed.datasets.blend.order import ARRAYS, IndexedOrder
from trackbed.index.blend import dataset_index_dtype, exhaustive_blend, greedy_blend

_KIND: Final = Kind(is_blend=True)
_DRAW_COST: Final = 40.0
"""Nanoseconds per sample, writing included: an upper bound for most blends, as threads cannot share a greedy blend."""
_SLICE: Final = 1 << 20
"""Positions processed at a time."""


class GreedyOrder(IndexedOrder):
    """Megatron Core's order: each sample is drawn from the dataset that is furthest behind its share."""

    @property
    def id_dtype(self) -> torch.dtype:
        """Dtype of the datasets' numbers in a batch."""
        return torch.int16 if self._dtype is np.int16 else torch.int32

    @property
    def _dtype(self) -> Any:
        return dataset_index_dtype(len(self.spec.datasets))

    def label(self, number: int) -> Any:
        """Returns the number of a dataset in the dtype of the index."""
        return self._dtype(number)

    def decisions(self) -> dict[str, Any]:
        """Returns nothing: the order depends only on datasets, weights and size."""
        return {}

    def request(self, entry: Callable[[], Entry | None]) -> Request | None:
        """Returns the request for the index, or None if it is kept in memory."""
        found = entry()
        return None if found is None else Request(found, _KIND, self)

    def expected(self) -> Mapping[str, ArraySpec]:
        """Returns dtypes and shapes of the two arrays."""
        shape = (len(self),)
        specs = (ArraySpec(np.dtype(self._dtype), shape), ArraySpec(np.dtype(np.int64), shape))
        return dict(zip(ARRAYS, specs, strict=True))

    def cost(self) -> float:
        """Estimates the nanoseconds to build the two arrays."""
        return _DRAW_COST * len(self)

    def build(self, allocate: Allocate) -> Arrays:
        """Builds the two arrays."""
        chosen, samples = blend(self.spec.weights, self.spec.size, allocate=allocate)
        self.spec.check_draws(draws_of_each(chosen, samples, num_datasets=len(self.spec.datasets)))
        return dict(zip(ARRAYS, (chosen, samples), strict=True))


def blend(
    weights: Sequence[float], size: int | None, *, allocate: Allocate = in_memory
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]:
    """Computes dataset and sample of each position; datasets of weight 0 are never drawn.

    Args:
        weights: `[K]` shares if `size` is given, else the number of samples drawn from each dataset.
        size: N, or None for the sum of the weights.
        allocate: allocates `dataset_index` and `dataset_sample_index`.

    Returns:
        `[N]` dataset and `[N]` sample of that dataset.

    >>> datasets, samples = blend([0.0, 0.5, 0.5], 3)
    >>> datasets.tolist(), samples.tolist()
    ([1, 2, 1], [0, 0, 1])
    """

    def poll(done: int) -> None:
        if len(drawn) == len(weights):  # otherwise the numbers of the datasets are not final yet
            allocate.filled(done, *ARRAYS)

    drawn = [number for number, weight in enumerate(weights) if weight]
    shares = [weights[number] for number in drawn]
    if size is None:
        chosen, samples = exhaustive_blend([int(share) for share in shares], allocate=allocate, poll=poll)
    else:
        chosen, samples = greedy_blend(shares, size, allocate=allocate, poll=poll)
    if len(drawn) < len(weights):
        numbers: npt.NDArray[np.integer[Any]] = np.array(drawn, dtype=dataset_index_dtype(len(weights)))
        if numbers.dtype != chosen.dtype:
            return numbers[chosen], samples
        for start in range(0, len(chosen), _SLICE):
            part = chosen[start : start + _SLICE]
            part[:] = numbers[part]
    return chosen, samples


def draws_of_each(
    datasets: npt.NDArray[np.integer[Any]], samples: npt.NDArray[np.int64], *, num_datasets: int
) -> list[int]:
    """Counts how often each dataset is drawn.

    That is one more than the sample number of its last draw, so only the end of the arrays is read.

    >>> draws_of_each(np.array([0, 1, 0], dtype=np.int16), np.array([0, 0, 1]), num_datasets=3)
    [2, 1, 0]
    """
    draws = np.zeros(num_datasets, dtype=np.int64)
    for stop in range(len(datasets), 0, -_SLICE):
        start = max(stop - _SLICE, 0)
        last = np.zeros(num_datasets, dtype=np.int64)
        last[datasets[start:stop]] = samples[start:stop] + 1  # of repeated indices, the last assignment wins
        draws = np.maximum(draws, last)
        if start == 0 or int(draws.sum()) == len(datasets):
            break
    return [int(count) for count in draws]
