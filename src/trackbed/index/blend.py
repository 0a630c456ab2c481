"""Blending indices: the dataset of each sample, and the sample's number in that dataset.

Shapes: K datasets, N samples.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.cancellation import Poll
from trackbed.errors import ArgumentError

Allocate = Callable[[str, tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]]
BlendIndices = tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]


def dataset_index_dtype(num_datasets: int) -> type[np.int16] | type[np.int32]:
    """int16 as in Megatron Core, up to its limit of 32,766 datasets; int32 above."""
    return np.int16 if num_datasets < np.iinfo(np.int16).max else np.int32


def in_memory(_name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Allocates an array that lies in no file."""
    return np.empty(shape, dtype=dtype)


def greedy_blend(
    weights: Sequence[float] | npt.NDArray[np.float64],
    num_samples: int,
    *,
    num_threads: int = 1,
    allocate: Allocate = in_memory,
    poll: Poll = None,
) -> BlendIndices:
    """Draws each sample from the dataset that is furthest behind its share; ties go to the lowest dataset number.

    Args:
        weights: `[K]` shares, finite, not normalized here.
        num_samples: N, at least 0.
        num_threads: at least 1. Each draw depends on the one before, so additional threads are not used yet.
        allocate: called with name, shape and dtype; returns the array to fill for `dataset_index` or
            `dataset_sample_index`.
        poll: progress callback, called with the number of samples drawn so far.

    Returns:
        `[N]` dataset of each sample, and `[N]` number of earlier samples of that dataset.

    Raises:
        ArgumentError: an argument is out of range.

    >>> datasets, samples = greedy_blend([1 / 2, 1 / 4, 1 / 4], 4)
    >>> datasets.tolist(), samples.tolist()
    ([0, 1, 2, 0], [0, 0, 0, 1])
    """
    if num_samples < 0 or num_threads < 1:
        raise ArgumentError(f"num_samples must be at least 0 and num_threads 1, found {num_samples} and {num_threads}")
    shares = np.asarray(weights, dtype=np.float64)
    datasets = allocate("dataset_index", (num_samples,), dataset_index_dtype(len(shares)))
    samples = allocate("dataset_sample_index", (num_samples,), np.int64)
    kernels.greedy_blend(shares, datasets, samples, poll=poll)
    return datasets, samples


def exhaustive_blend(
    sizes: Sequence[int] | npt.NDArray[np.int64],
    *,
    allocate: Allocate = in_memory,
    poll: Poll = None,
) -> BlendIndices:
    """Draws every sample of every dataset once, spread evenly.

    Args:
        sizes: `[K]` samples of each dataset, each at least 1.
        allocate: called with name, shape and dtype; returns the array to fill for `dataset_index` or
            `dataset_sample_index`.
        poll: progress callback, called with the number of samples drawn so far.

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
