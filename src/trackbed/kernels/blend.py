"""Typed wrappers of the blending kernels.

Shapes: K datasets, N samples.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed.cancellation import Poll, current_poll
from trackbed.errors import ArgumentError
from trackbed.kernels import _native
from trackbed.kernels.isa import chosen_level
from trackbed.kernels.outputs import check_output
from trackbed.kernels.permutation import check_size_and_key

DatasetIds = npt.NDArray[np.integer[Any]]


def greedy_blend(
    weights: npt.NDArray[np.float64],
    dataset_index: DatasetIds,
    dataset_sample_index: npt.NDArray[np.int64],
    *,
    poll: Poll = None,
) -> None:
    """Fills both outputs: sample i comes from the dataset furthest behind its share, the lowest number on ties.

    Args:
        weights: `[K]` share of each dataset, finite, not normalized here.
        dataset_index: `[N]` receives the dataset of each sample; numbers wrap if K exceeds its type.
        dataset_sample_index: `[N]` receives the number of earlier samples of that dataset.
        poll: progress callback.

    Raises:
        ArgumentError: no weights, a weight that is not finite, or outputs of other lengths or types.
    """
    weights = np.require(weights, dtype=np.float64, requirements=["C", "A"])
    if weights.ndim != 1 or len(weights) == 0 or not np.isfinite(weights).all():
        raise ArgumentError(f"weights must be a vector of at least one finite number, found {weights}")
    _check_outputs(dataset_index, dataset_sample_index)
    _native.greedy_blend(weights, dataset_index, dataset_sample_index, chosen_level(), current_poll(poll))


def exhaustive_blend(
    sizes: npt.NDArray[np.int64],
    dataset_index: DatasetIds,
    dataset_sample_index: npt.NDArray[np.int64],
    *,
    poll: Poll = None,
) -> None:
    """Fills both outputs with exactly `sizes[d]` samples of each dataset d, spread evenly.

    Args:
        sizes: `[K]` samples of each dataset, each at least 1.
        dataset_index: `[N]` with N = sum(sizes), receives the dataset of each sample.
        dataset_sample_index: `[N]` receives the number of earlier samples of that dataset.
        poll: progress callback.

    Raises:
        ArgumentError: a size is not an integer or is below 1, or an output has another type or a length that is not
            the sum of the sizes.
    """
    _check_outputs(dataset_index, dataset_sample_index)
    sizes = _as_sizes(sizes, len(dataset_index), lowest=1)
    if len(sizes):
        _native.exhaustive_blend(sizes, dataset_index, dataset_sample_index, chosen_level(), current_poll(poll))


def balanced_blend(
    sizes: npt.NDArray[np.int64],
    dataset_index: DatasetIds,
    dataset_sample_index: npt.NDArray[np.integer[Any]],
    *,
    key: int,
    num_threads: int = 1,
    poll: Poll = None,
) -> None:
    """Fills both outputs with exactly `sizes[d]` samples of each dataset d, all shuffled together.

    Args:
        sizes: `[K]` samples of each dataset, each at least 0.
        dataset_index: `[N]` uint16 or uint32 with N = sum(sizes), receives the dataset of each sample.
        dataset_sample_index: `[N]` uint32 or int64, receives its number in that dataset.
        key: key of the shuffle, in `[0, 2**64)`.
        num_threads: at least 1; the result does not depend on it.
        poll: progress callback.

    Raises:
        ArgumentError: a size is not an integer or is below 0, `key` is out of range, or an output has another type,
            a type that is too narrow, or a length that is not the sum of the sizes.
    """
    _check_outputs(dataset_index, dataset_sample_index, ids=(np.uint16, np.uint32), samples=(np.uint32, np.int64))
    sizes = _as_sizes(sizes, len(dataset_index), lowest=0)
    check_size_and_key(max(len(dataset_index), 1), key)
    highest = max(len(sizes) - 1, 0), int(sizes.max(initial=1)) - 1
    for name, array, number in zip(
        ("dataset_index", "dataset_sample_index"), (dataset_index, dataset_sample_index), highest, strict=True
    ):
        if number > np.iinfo(array.dtype).max:
            raise ArgumentError(f"{name} must hold {number}, found {array.dtype}")
    if len(dataset_index):
        _native.balanced_blend(
            sizes, key, dataset_index, dataset_sample_index, chosen_level(), num_threads, current_poll(poll)
        )


def _as_sizes(sizes: npt.NDArray[np.int64], output_length: int, *, lowest: int) -> npt.NDArray[np.int64]:
    """The sizes as a contiguous int64 vector, checked to add up to the length of the outputs."""
    given = np.asarray(sizes)
    wanted = np.require(given, dtype=np.int64, requirements=["C", "A"])
    if wanted.ndim != 1 or (wanted < lowest).any() or (len(wanted) and given.dtype.kind not in "iu"):
        raise ArgumentError(f"sizes must be a vector of integers of at least {lowest}, found {given}")
    total = sum(wanted.tolist())
    if total != output_length:
        raise ArgumentError(f"the outputs must hold sum(sizes) = {total} samples, found {output_length}")
    return wanted


def _check_outputs(
    dataset_index: DatasetIds,
    dataset_sample_index: npt.NDArray[np.integer[Any]],
    *,
    ids: tuple[type[np.integer[Any]], ...] = (np.int16, np.int32),
    samples: tuple[type[np.integer[Any]], ...] = (np.int64,),
) -> None:
    if dataset_index.shape != dataset_sample_index.shape or dataset_index.ndim != 1:
        raise ArgumentError(
            "dataset_index and dataset_sample_index must be vectors of one length, "
            f"found shapes {dataset_index.shape} and {dataset_sample_index.shape}"
        )
    check_output("dataset_index", dataset_index, dtypes=ids)
    check_output("dataset_sample_index", dataset_sample_index, dtypes=samples)
