"""Typed doors to the blending kernels.

Shapes: K datasets, N samples.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.isa import chosen_level
from trackbed.kernels.outputs import check_output
from trackbed.kernels.poll import Poll

__all__ = ["exhaustive_blend", "greedy_blend"]

DatasetIds = npt.NDArray[np.integer[Any]]


def greedy_blend(
    weights: npt.NDArray[np.float64],
    dataset_index: DatasetIds,
    dataset_sample_index: npt.NDArray[np.int64],
    *,
    poll: Poll = None,
) -> None:
    """Fill both outputs: sample i comes from the dataset furthest behind its share, the lowest on ties.

    Args:
        weights: `[K]` share of each dataset, finite, taken as they are.
        dataset_index: `[N]` receives the dataset of each sample; numbers wrap if K exceeds its type.
        dataset_sample_index: `[N]` receives how many samples of that dataset came before.
        poll: looks in while it runs.

    Raises:
        ArgumentError: no weights, a weight that is not finite, or outputs of other lengths or types.
    """
    weights = np.require(weights, dtype=np.float64, requirements=["C", "A"])
    if weights.ndim != 1 or len(weights) == 0 or not np.isfinite(weights).all():
        msg = f"weights must be a vector of at least one finite number, found {weights}"
        raise ArgumentError(msg)
    _check_outputs(dataset_index, dataset_sample_index)
    _native.greedy_blend(weights, dataset_index, dataset_sample_index, chosen_level(), poll)


def exhaustive_blend(
    sizes: npt.NDArray[np.int64],
    dataset_index: DatasetIds,
    dataset_sample_index: npt.NDArray[np.int64],
    *,
    poll: Poll = None,
) -> None:
    """Fill both outputs with exactly `sizes[d]` samples of each dataset d, spread evenly.

    Args:
        sizes: `[K]` samples of each dataset, each at least 1.
        dataset_index: `[N]` with N = sum(sizes), receives the dataset of each sample.
        dataset_sample_index: `[N]` receives how many samples of that dataset came before.
        poll: looks in while it runs.

    Raises:
        ArgumentError: a size that is no integer or below 1, or outputs of another type, or whose length is
            not the sum of the sizes.
    """
    given = np.asarray(sizes)
    sizes = np.require(given, dtype=np.int64, requirements=["C", "A"])
    if sizes.ndim != 1 or (sizes < 1).any() or (len(sizes) and given.dtype.kind not in "iu"):
        msg = f"sizes must be a vector of integers of at least 1, found {given}"
        raise ArgumentError(msg)
    _check_outputs(dataset_index, dataset_sample_index)
    total = sum(sizes.tolist())
    if total != len(dataset_index):
        msg = f"the outputs must hold sum(sizes) = {total} samples, found {len(dataset_index)}"
        raise ArgumentError(msg)
    if total:
        _native.exhaustive_blend(sizes, dataset_index, dataset_sample_index, chosen_level(), poll)


def _check_outputs(dataset_index: DatasetIds, dataset_sample_index: npt.NDArray[np.int64]) -> None:
    if dataset_index.shape != dataset_sample_index.shape or dataset_index.ndim != 1:
        msg = (
            "dataset_index and dataset_sample_index must be vectors of one length, "
            f"found shapes {dataset_index.shape} and {dataset_sample_index.shape}"
        )
        raise ArgumentError(msg)
    check_output("dataset_index", dataset_index, dtypes=(np.int16, np.int32))
    check_output("dataset_sample_index", dataset_sample_index, dtypes=(np.int64,))
