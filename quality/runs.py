"""Images to make statistics of: whole permutations, or runs of positions of one that is too large.

Shapes: R runs, M positions in each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quality.shuffles import Positions, Shuffle


@dataclass(frozen=True, slots=True)
class Runs:
    """`[R, M]` images of R runs."""

    images: Positions
    size: int
    is_whole: bool
    """Whether each run is all of a permutation, in order."""


def whole(shuffle: Shuffle, size: int, seeds: Sequence[int]) -> Iterator[Runs]:
    """All images of each seed's permutation, at most about a million at a time."""
    positions = np.arange(size, dtype=np.int64)
    together = max(1, 1_000_000 // size)
    for first in range(0, len(seeds), together):
        rows = [shuffle(size, seed)(positions) for seed in seeds[first : first + together]]
        yield Runs(np.stack(rows), size, is_whole=True)


def sampled(
    shuffle: Shuffle, size: int, seeds: Sequence[int], *, num_runs: int, length: int, stride: int
) -> Iterator[Runs]:
    """For each seed, `num_runs` runs of `length` positions that are `stride` apart, from anywhere."""
    for seed in seeds:
        generator = np.random.default_rng([seed, stride])
        starts = generator.integers(0, size - stride * (length - 1), num_runs)
        positions = starts[:, None] + stride * np.arange(length, dtype=np.int64)
        images = shuffle(size, seed)(positions.reshape(-1))
        yield Runs(images.reshape(positions.shape), size, is_whole=False)
