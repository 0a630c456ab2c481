"""The sample index: the start of each sample in the stream of visited documents.

Shapes: D documents in the file, V visits, R samples.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.cancellation import Poll


def sample_index_dtype(num_visits: int, longest_document: int) -> type[np.int32] | type[np.int64]:
    """int32 if both arguments fit it, as in Megatron Core, else int64.

    Args:
        num_visits: V.
        longest_document: tokens of the longest document of the whole file, 0 for an empty one.
    """
    return np.int32 if max(num_visits, longest_document) <= np.iinfo(np.int32).max else np.int64


def sample_index(
    lengths: npt.NDArray[np.int32],
    visits: npt.NDArray[np.integer[Any]],
    num_samples: int,
    *,
    sequence_length: int,
    extra_token: int,
    num_threads: int = 1,
    allocate: Callable[..., npt.NDArray[Any]] = np.empty,
    poll: Poll = None,
) -> npt.NDArray[np.integer[Any]]:
    """Visit and token offset in that visit at which each sample starts, and at which the last sample ends.

    Args:
        lengths: `[D]` tokens in each document, each at least 0.
        visits: `[V]` document visited at each step, each in `[0, D)`.
        num_samples: R.
        sequence_length: tokens from one sample's start to the next, at least 1.
        extra_token: 1 if a sample also holds the first token of the next one, else 0.
        num_threads: at least 1.
        allocate: called with shape and dtype; returns the array to fill.
        poll: progress callback, called with the number of rows done.

    Returns:
        `[R + 1, 2]` rows; sample j lies between rows j and j + 1.

    The example of Megatron Core's documentation:

    >>> lengths = np.array([1536, 700, 400, 500, 1300, 2048], dtype=np.int32)
    >>> visits = np.array([0, 5, 1, 2, 3, 4], dtype=np.int32)
    >>> sample_index(lengths, visits, 3, sequence_length=1024, extra_token=1).tolist()
    [[0, 0], [0, 1024], [1, 512], [1, 1536]]
    """
    longest = int(lengths.max()) if lengths.dtype.itemsize > 4 and len(lengths) else 0
    dtype = np.int64 if visits.dtype == np.int64 else sample_index_dtype(len(visits), longest)
    rows = allocate((num_samples + 1, 2), dtype)
    kernels.sample_index(
        lengths,
        visits,
        rows,
        sequence_length=sequence_length,
        extra_token=extra_token,
        num_threads=num_threads,
        poll=poll,
    )
    return rows
