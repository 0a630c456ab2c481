"""The blending indices: from which dataset each sample comes, and which of its samples that is.

Shapes: K datasets, N samples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.cancellation import Poll
from trackbed.errors import ArgumentError

__all__ = ["dataset_index_dtype", "exhaustive_blend", "greedy_blend"]

Allocate = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]
BlendIndices = tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]


def dataset_index_dtype(num_datasets: int) -> type[np.int16] | type[np.int32]:
    """int16, as Megatron Core's, up to the 32,766 datasets that it takes; int32 above."""
    return np.int16 if num_datasets < np.iinfo(np.int16).max else np.int32


def _in_memory(_name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.empty(shape, dtype=dtype)


def greedy_blend(
    weights: Sequence[float] | npt.NDArray[np.float64],
    num_samples: int,
    *,
    num_threads: int = 1,
    allocate: Allocate = _in_memory,
    poll: Poll = None,
) -> BlendIndices:
    """Each sample from the dataset that is furthest behind its share, the lowest number on ties.

    Args:
        weights: `[K]` shares, taken as they are, finite.
        num_samples: N, at least 0.
        num_threads: at least 1. Each draw depends on the one before, so more than one are of no use yet.
        allocate: gives `dataset_index` and `dataset_sample_index` to be filled, from name, shape and dtype.
        poll: looks in while it runs, with the number of samples that are drawn.

    Returns:
        `[N]` dataset of each sample, and `[N]` how many samples of that dataset came before it.

    Raises:
        ArgumentError: an argument is out of range.

    >>> datasets, samples = greedy_blend([1 / 2, 1 / 4, 1 / 4], 4)
    >>> datasets.tolist(), samples.tolist()
    ([0, 1, 2, 0], [0, 0, 0, 1])
    """
    if num_samples < 0 or num_threads < 1:
        msg = f"num_samples must be at least 0 and num_threads 1, found {num_samples} and {num_threads}"
        raise ArgumentError(msg)
    shares = np.asarray(weights, dtype=np.float64)
    datasets = allocate("dataset_index", (num_samples,), dataset_index_dtype(len(shares)))
    samples = allocate("dataset_sample_index", (num_samples,), np.int64)
    kernels.greedy_blend(shares, datasets, samples, poll=poll)
    return datasets, samples


def exhaustive_blend(
    sizes: Sequence[int] | npt.NDArray[np.int64],
    *,
    allocate: Allocate = _in_memory,
    poll: Poll = None,
) -> BlendIndices:
    """Every sample of every dataset once, spread evenly.

    Args:
        sizes: `[K]` samples of each dataset, each at least 1.
        allocate: gives `dataset_index` and `dataset_sample_index` to be filled, from name, shape and dtype.
        poll: looks in while it runs, with the number of samples that are drawn.

    Returns:
        `[N]` dataset of each sample and `[N]` sample of that dataset, with N = sum(sizes).

    Raises:
        ArgumentError: a size is below 1.

    >>> datasets, samples = exhaustive_blend([2, 1])
    >>> datasets.tolist(), samples.tolist()
    ([0, 1, 0], [0, 0, 1])
    """
    counts = np.asarray(sizes, dtype=np.int64)
    num_samples = int(counts.sum())
    datasets = allocate("dataset_index", (num_samples,), dataset_index_dtype(len(counts)))
    samples = allocate("dataset_sample_index", (num_samples,), np.int64)
    kernels.exhaustive_blend(counts, datasets, samples, poll=poll)
    return datasets, samples
