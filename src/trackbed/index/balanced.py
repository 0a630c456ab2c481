"""The balanced order: a blend of exact proportions, shuffled as a whole.

Implements the algorithm of the article "100x faster dataset construction" (docs/explanation/balanced.md), with a
permutation that needs no memory. The output for a seed never changes within a version.

Shapes: K datasets, N samples.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trackbed import kernels
from trackbed.cancellation import Poll
from trackbed.errors import ArgumentError
from trackbed.index.blend import Allocate, in_memory

BALANCED_VERSION: Final = 1

BlendIndices = tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]]]


def largest_remainders(weights: Sequence[float], num_samples: int) -> list[int]:
    """Number of samples of each dataset out of N: its share rounded down, plus one for the largest remainders.

    Each weight is taken as the exact fraction that its double represents, and all arithmetic is in integers, so there
    is no rounding error. Ties go to the lowest dataset number.

    Args:
        weights: `[K]` finite, at least 0, not all 0; a dataset's share is its weight divided by their sum.
        num_samples: N, at least 0.

    Raises:
        ArgumentError: an argument is out of range.

    >>> largest_remainders([0.5, 0.25, 0.25], 7)
    [3, 2, 2]
    """
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights) or num_samples < 0:
        raise ArgumentError(
            f"weights must be finite, at least 0 and not all 0, and num_samples at least 0, found {weights}"
        )
    fractions = [float(weight).as_integer_ratio() for weight in weights]
    whole = max(denominator for _, denominator in fractions)  # powers of 2: all divide the largest
    shares = [numerator * (whole // denominator) for numerator, denominator in fractions]
    total = sum(shares)
    counts, remainders = zip(*(divmod(share * num_samples, total) for share in shares), strict=True)
    given = list(counts)
    by_remainder = sorted(range(len(shares)), key=lambda dataset: (-remainders[dataset], dataset))
    for dataset in by_remainder[: num_samples - sum(counts)]:
        given[dataset] += 1
    return given


def balanced_dtypes(sizes: Sequence[int]) -> tuple[type[np.integer[Any]], type[np.integer[Any]]]:
    """Types of dataset and sample numbers.

    Datasets are uint16 up to 65,535 of them, else uint32; samples are uint32 where they fit, else int64.
    """
    narrow_ids = len(sizes) <= np.iinfo(np.uint16).max
    narrow_samples = max(sizes, default=0) <= np.iinfo(np.uint32).max
    return np.uint16 if narrow_ids else np.uint32, np.uint32 if narrow_samples else np.int64


def balanced_blend(
    sizes: Sequence[int],
    *,
    seed: int,
    num_threads: int = 1,
    allocate: Allocate = in_memory,
    poll: Poll = None,
) -> BlendIndices:
    """Blends exactly `sizes[d]` samples of each dataset d, shuffled together.

    Args:
        sizes: `[K]` samples of each dataset, each at least 0.
        seed: in `[0, 2**64)`.
        num_threads: at least 1; the result does not depend on it.
        allocate: called with name, shape and dtype; returns the array to fill for `dataset_index` or
            `dataset_sample_index`.
        poll: progress callback, see `trackbed.Poll`.

    Returns:
        `[N]` dataset of each sample and `[N]` its number in that dataset, with N = sum(sizes).

    Raises:
        ArgumentError: an argument is out of range.

    >>> datasets, samples = balanced_blend([2, 1], seed=1234)
    >>> sorted(zip(datasets.tolist(), samples.tolist()))
    [(0, 0), (0, 1), (1, 0)]
    """
    ids, numbers = balanced_dtypes(sizes)
    num_samples = sum(sizes)
    datasets = allocate("dataset_index", (num_samples,), ids)
    samples = allocate("dataset_sample_index", (num_samples,), numbers)
    counts = np.array(sizes, dtype=np.int64)
    kernels.balanced_blend(counts, datasets, samples, key=seed, num_threads=num_threads, poll=poll)
    return datasets, samples
