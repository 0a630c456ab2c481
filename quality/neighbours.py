"""What consecutive positions have to do with each other: blocks in common, differences, correlation.

Shapes: R runs, M positions in each.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from quality.check import Law, Statistic
from quality.runs import Runs
from quality.shuffles import Positions
from quality.tables import NUM_BLOCKS, block_sizes, blocks_of

_SHORT_STEP = 4


def same_block_neighbours(runs: Iterable[Runs]) -> Statistic:
    """How often two consecutive positions have images in one of 64 contiguous blocks."""
    value, mean, variance, size = 0, 0.0, 0.0, 0
    for run in runs:
        size = run.size
        num_blocks = min(NUM_BLOCKS, size // 2)
        blocks = blocks_of(run.images, size, num_blocks)
        value += int((blocks[:, 1:] == blocks[:, :-1]).sum())
        each = _same_block_moments(size, num_blocks, run.images.shape[1])
        mean += len(run.images) * each[0]
        variance += len(run.images) * each[1]
    return Statistic(size=size, name="same-block neighbours", value=value, mean=mean, variance=variance, law=Law.GAMMA)


def _same_block_moments(size: int, num_blocks: int, length: int) -> tuple[float, float]:
    """Mean and variance of pairs in one block, in `length` consecutive positions of a random permutation: exact."""
    sizes = [int(each) for each in block_sizes(size, num_blocks)]

    def ways(count: int, within: int) -> int:
        return math.prod(range(within - count + 1, within + 1))

    two = Fraction(sum(ways(2, each) for each in sizes), ways(2, size))
    three = Fraction(sum(ways(3, each) for each in sizes), ways(3, size))
    squares = sum(ways(2, each) for each in sizes) ** 2 - sum(ways(2, each) ** 2 for each in sizes)
    four = Fraction(sum(ways(4, each) for each in sizes) + squares, ways(4, size))
    pairs = length - 1
    touching = 2 * (pairs - 1)
    apart = pairs * pairs - pairs - touching
    mean = pairs * two
    return float(mean), float(pairs * two + touching * three + apart * four - mean * mean)


def differences(runs: Iterable[Runs], *, lag: int = 1) -> Statistic:
    """The differences between images `lag` apart, modulo the size, in up to 64 equal cells.

    Each difference from 1 to n - 1 is equally likely. Two differences of one permutation depend on each other so
    little that the variance of a cell is off by a share of about 1 / n: from a size of 100 on, that is nothing.
    """
    counts = np.zeros(0, dtype=np.int64)
    size = 0
    for run in runs:
        size = run.size
        cells = min(64, (size - 1) // 4)
        found = (run.images[:, lag:] - run.images[:, :-lag]) % size - 1
        table = np.bincount(blocks_of(found, size - 1, cells).reshape(-1), minlength=cells)
        counts = counts + table if len(counts) else table
    expected = counts.sum() * block_sizes(size - 1, len(counts)) / (size - 1)
    value = float(((counts - expected) ** 2 / expected).sum())
    degrees = len(counts) - 1
    return Statistic(
        size=size, name=f"differences, lag {lag}", value=value, mean=degrees, variance=2 * degrees, law=Law.GAMMA
    )


def short_steps(runs: Iterable[Runs], *, lag: int = 1) -> Statistic:
    """How often two images `lag` apart are at most four apart."""
    value, mean, size = 0, 0.0, 0
    for run in runs:
        size = run.size
        found = np.abs(run.images[:, lag:] - run.images[:, :-lag])
        value += int((found <= _SHORT_STEP).sum())
        ways = sum(2 * (size - step) for step in range(1, _SHORT_STEP + 1))
        mean += found.size * ways / (size * (size - 1))
    return Statistic(size=size, name=f"short steps, lag {lag}", value=value, mean=mean, law=Law.POISSON)


def serial_correlation(runs: Iterable[Runs], *, lag: int = 1) -> Statistic:
    """The sum of products of images `lag` apart, standardised: round the circle for whole permutations.

    Mean and variance are exact for whole permutations (Wald and Wolfowitz 1943), and those of independent images for
    runs. `lag` must not be half the size.
    """
    value = mean = variance = 0.0
    size = 0
    for run in runs:
        size, length = run.size, run.images.shape[1]
        images = _standardised(run.images, size)
        if run.is_whole:
            value += float((images * np.roll(images, -lag, axis=1)).sum())
            fourth = size * 0.6 * (3 * size**2 - 7) / (size**2 - 1)
            its_mean = -size / (size - 1)
            its_variance = (
                (size**2 - fourth) / (size - 1) + (size**2 - 2 * fourth) / ((size - 1) * (size - 2)) - its_mean**2
            )
        else:
            value += float((images[:, lag:] * images[:, :-lag]).sum())
            its_mean, its_variance = 0.0, float(length - lag)
        mean += len(images) * its_mean
        variance += len(images) * its_variance
    return Statistic(
        size=size,
        name=f"serial correlation, lag {lag}",
        value=value,
        mean=mean,
        variance=variance,
        law=Law.NORMAL,
    )


def _standardised(images: Positions, size: int) -> npt.NDArray[np.float64]:
    centred: npt.NDArray[np.float64] = images.astype(np.float64) - (size - 1) / 2
    return centred / math.sqrt((size**2 - 1) / 12)
