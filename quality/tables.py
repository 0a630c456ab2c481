"""Chi-squares of tables: where positions go, and what batches are composed of.

Shapes: R runs, M positions in each.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quality.check import Law, Statistic
from quality.runs import Runs
from quality.shuffles import Positions

NUM_BLOCKS = 64
"""Contiguous blocks that the images of a permutation are cut into: files of a dataset, say."""


def block_sizes(size: int, num_blocks: int) -> npt.NDArray[np.int64]:
    """How many of `[0, size)` are in each of the blocks that `blocks_of` says."""
    borders = -(-np.arange(num_blocks + 1, dtype=np.int64) * size // num_blocks)
    return np.diff(borders)


def blocks_of(images: Positions, size: int, num_blocks: int) -> Positions:
    """Which of `num_blocks` equal blocks each image is in; size * num_blocks must fit 63 bits."""
    return images * num_blocks // size


def positions(runs: Iterable[Runs]) -> Statistic:
    """Where whole permutations send the positions of each stretch, all seeds together.

    The table of stretches against blocks adds up over the seeds, so its cells become normal. Their covariances under
    random permutations are known: (n - 1) / n times the usual sum is chi-square.
    """
    counts = np.zeros((0, 0))
    num_rows, size = 0, 0
    for run in runs:
        size = run.size
        cells = _table_side(size)
        stretch = blocks_of(np.arange(size), size, cells)
        table = np.bincount((stretch * cells + blocks_of(run.images, size, cells)).reshape(-1), minlength=cells**2)
        counts = counts + table if num_rows else table.astype(np.float64)
        num_rows += len(run.images)
    sizes = block_sizes(size, _table_side(size)).astype(np.float64)
    expected = num_rows * np.outer(sizes, sizes).reshape(-1) / size
    value = (size - 1) / size * ((counts - expected) ** 2 / expected).sum()
    degrees = (len(sizes) - 1) ** 2
    return Statistic(size=size, name="positions", value=float(value), mean=degrees, variance=2 * degrees, law=Law.GAMMA)


def images_of_runs(runs: Iterable[Runs]) -> list[Statistic]:
    """Images of runs in equal blocks, and by their remainder: as many in each."""
    counts = np.zeros((2, NUM_BLOCKS))
    size = 0
    for run in runs:
        size = run.size
        for row, cells in zip(counts, (blocks_of(run.images, size, NUM_BLOCKS), run.images % NUM_BLOCKS), strict=True):
            row += np.bincount(cells.reshape(-1), minlength=NUM_BLOCKS)
    remainders = np.full(NUM_BLOCKS, size // NUM_BLOCKS) + (np.arange(NUM_BLOCKS) < size % NUM_BLOCKS)
    statistics = []
    for name, row, sizes in (
        ("positions", counts[0], block_sizes(size, NUM_BLOCKS)),
        ("positions, remainders", counts[1], remainders),
    ):
        expected = row.sum() * sizes / size
        value = ((row - expected) ** 2 / expected).sum()
        degrees = NUM_BLOCKS - 1
        statistics.append(
            Statistic(size=size, name=name, value=float(value), mean=degrees, variance=2 * degrees, law=Law.GAMMA)
        )
    return statistics


def batch_composition(runs: Iterable[Runs], *, batch: int = 256) -> Statistic:
    """How far the batches of consecutive positions are from having their share of each block.

    The chi-square of each permutation's table of batches against blocks, summed. Mean and variance are those of
    tables with fixed margins (Haldane 1940, Dawson 1954) for whole permutations, and of multinomial counts for runs.
    """
    value = mean = variance = 0.0
    size = 0
    for run in runs:
        size, length = run.size, run.images.shape[1]
        num_blocks = min(NUM_BLOCKS, size // 2)
        its_batch = min(batch, max(1, size // 4))
        batches = np.arange(length) // its_batch
        num_batches = int(batches[-1]) + 1
        margins = np.bincount(batches).astype(np.float64)
        shares = block_sizes(size, num_blocks) / size
        expected = np.outer(margins, shares)
        for row in run.images:
            table = np.bincount(batches * num_blocks + blocks_of(row, size, num_blocks), minlength=expected.size)
            value += float(((table.reshape(num_batches, num_blocks) - expected) ** 2 / expected).sum())
        each = _fixed_margins(margins, shares * size) if run.is_whole else _multinomial(margins, shares)
        mean += len(run.images) * each[0]
        variance += len(run.images) * each[1]
    return Statistic(size=size, name="batch composition", value=value, mean=mean, variance=variance, law=Law.GAMMA)


def _table_side(size: int) -> int:
    """As many cells a side as leave five to each, at most 16."""
    return int(min(16, max(2, (size / 5) ** 0.5)))


def _fixed_margins(rows: npt.NDArray[np.float64], columns: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Mean and variance of the chi-square of a table whose margins are fixed."""
    total = float(rows.sum())
    degrees, spread, unevenness = [], [], []
    for margin in (rows, columns):
        cells = len(margin)
        degrees.append(cells - 1)
        spread.append((cells - 1) * (total - cells) / (total - 1))
        unevenness.append(float((total / margin).sum() - cells**2) / (total - 2))
    mean = total * degrees[0] * degrees[1] / (total - 1)
    even = 2 * total / (total - 3) * (spread[0] - unevenness[0]) * (spread[1] - unevenness[1])
    return mean, even + total**2 / (total - 1) * unevenness[0] * unevenness[1]


def _multinomial(batches: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Mean and variance of the summed chi-squares of batches that are drawn one by one (Pearson 1932)."""
    degrees = len(shares) - 1
    uneven = float((1 / shares).sum()) - len(shares) ** 2 - 2 * degrees
    variances = [2 * degrees + uneven / float(batch) for batch in batches]
    return degrees * len(batches), sum(variances)
