"""Which rank reads which part of a step: a permutation of the ranks that is drawn for each step.

In an even blend neighbouring samples come from the datasets in turn, so a rank that always reads the same place of a
step reads some datasets more often than others, or not at all.
"""

import numpy as np
import numpy.typing as npt

from trackbed.index.split_mix import split_mix, split_mix_words

_STREAM = 0x72616E6B73  # apart from the streams that other orders start from the same seed


def shuffled_ranks(num_ranks: int, *, seed: int, position: int) -> npt.NDArray[np.int64]:
    """`[num_ranks]` part of the step at a position that each rank reads: a permutation of `[0, num_ranks)`.

    It is the stable order of the first words of a SplitMix64 stream, which begins at word `position` of a stream of the
    seed. It is part of the contract of a position, and never changes.

    Args:
        num_ranks: number of ranks, at least 1.
        seed: seed in `[0, 2**64)`.
        position: samples that all ranks together have read before the step, at least 0.

    >>> shuffled_ranks(4, seed=1234, position=0).tolist(), shuffled_ranks(4, seed=1234, position=4).tolist()
    ([3, 2, 1, 0], [0, 3, 1, 2])
    """
    start = split_mix(split_mix(seed ^ _STREAM, 0), position)
    return np.argsort(split_mix_words(start, num_ranks), kind="stable").astype(np.int64, copy=False)


def part_of_rank(rank: int, num_ranks: int, *, seed: int | None, position: int) -> int:
    """Part of the step at a position that a rank reads; its own number without a seed, or alone."""
    if seed is None or num_ranks == 1:
        return rank
    return int(shuffled_ranks(num_ranks, seed=seed, position=position)[rank])
