"""Whether every image comes once."""

from collections.abc import Iterable

import numpy as np

from quality.check import Law, Statistic
from quality.shuffles import Shuffle


def bijection(shuffle: Shuffle, sizes: Iterable[int], *, seed: int) -> Statistic:
    """How many images are missing, all sizes together; `size` is the largest, or the first with one missing."""
    missing, worst, largest, num_sizes = 0, 0, 0, 0
    for size in sizes:
        images = shuffle(size, seed)(np.arange(size, dtype=np.int64))
        inside = images[(images >= 0) & (images < size)]
        here = size - int(np.count_nonzero(np.bincount(inside, minlength=size)))
        worst = worst or (size if here else 0)
        missing += here
        largest = max(largest, size)
        num_sizes += 1
    return Statistic(
        size=worst or largest, name=f"missing images, {num_sizes:,} sizes", value=missing, mean=0, law=Law.FIXED
    )


def around_powers(bases: Iterable[int], largest: int) -> list[int]:
    """Every power of the bases up to `largest`, and what is one less and one more.

    >>> around_powers((2, 3), 5)
    [1, 2, 3, 4, 5]
    """
    powers = {base**exponent for base in bases for exponent in range(64) if base**exponent <= largest}
    return sorted({power + offset for power in powers for offset in (-1, 0, 1) if 1 <= power + offset <= largest + 1})
