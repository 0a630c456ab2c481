"""How many pairs of positions have their images the other way round.

Shapes: R runs, M positions in each.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quality.check import Law, Statistic
from quality.runs import Runs
from quality.shuffles import Positions


def inversions(runs: Iterable[Runs]) -> list[Statistic]:
    """Their mean, how far they scatter, and in how many runs they are odd: a run's parity is that of its permutation.

    The moments are exact. The counts are normal from about a hundred positions on, and less spread below.
    """
    counts, size, length = [], 0, 0
    for run in runs:
        size, length = run.size, run.images.shape[1]
        counts.append(count_inversions(run.images))
    found = np.concatenate(counts).astype(np.float64)
    mean = length * (length - 1) / 4
    variance = length * (length - 1) * (2 * length + 5) / 72
    scatter = float(((found - mean) ** 2).sum()) / variance
    return [
        Statistic(
            size=size,
            name="inversions, mean",
            value=float(found.mean()),
            mean=mean,
            variance=variance / len(found),
            law=Law.NORMAL,
        ),
        Statistic(
            size=size,
            name="inversions, scatter",
            value=scatter,
            mean=len(found),
            variance=2 * len(found),
            law=Law.GAMMA,
        ),
        Statistic(
            size=size,
            name="odd permutations",
            value=float((found % 2).sum()),
            mean=len(found) / 2,
            variance=len(found) / 4,
            law=Law.NORMAL,
        ),
    ]


def count_inversions(images: Positions) -> npt.NDArray[np.int64]:
    """`[R]` number of pairs in each run of different numbers of which the earlier is the larger.

    Bit by bit of the ranks, from the highest: among numbers that agree above, each 0 is inverted with the 1s before
    it. A stable sort by the bits so far keeps those together.

    >>> count_inversions(np.array([[0, 1, 2, 3], [30, 20, 10, 0], [1, 0, 3, 2]])).tolist()
    [0, 6, 2]
    """
    num_runs, length = images.shape
    ranks = np.empty_like(images)
    np.put_along_axis(ranks, np.argsort(images, axis=1), np.arange(length, dtype=np.int64)[None, :], axis=1)
    total = np.zeros(num_runs, dtype=np.int64)
    current = ranks
    for bit in reversed(range(max(length - 1, 1).bit_length())):
        ones = current >> bit & 1
        before = np.cumsum(ones, axis=1) - ones
        # Numbers that agree above this bit stand together, from place `group` on; `length` of them or fewer.
        group = current >> (bit + 1) << (bit + 1)
        inside = before - np.take_along_axis(before, np.minimum(group, length - 1), axis=1)
        total += (inside * (1 - ones)).sum(axis=1)
        # Stable partition: a 0 goes to the front of its group, a 1 behind the zeros, which are all that fit.
        places = np.where(ones == 1, group + (1 << bit) + inside, np.arange(length) - inside)
        np.put_along_axis(moved := np.empty_like(current), places, current, axis=1)
        current = moved
    return total
