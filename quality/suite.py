"""Which statistics are made, of which sizes and of how many seeds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from quality.avalanche import avalanche
from quality.bijection import around_powers, bijection
from quality.check import Statistic
from quality.inversions import inversions
from quality.neighbours import differences, same_block_neighbours, serial_correlation, short_steps
from quality.runs import Runs, sampled, whole
from quality.shuffles import Shuffle
from quality.tables import batch_composition, images_of_runs, positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run of the suite looks at. Seeds are the numbers from 0 on."""

    every_size_up_to: int
    """Bijections at every size from 1 to this."""
    around_powers_up_to: int
    """Bijections at powers of two, three, four and ten, and one beside them."""
    whole: tuple[tuple[int, int], ...]
    """Sizes of which whole permutations are looked at, and of how many seeds."""
    sampled: tuple[int, ...]
    """Sizes of which runs of positions are looked at."""
    sampled_seeds: int
    num_runs: int
    """Runs of each seed and stride."""
    run_length: int
    """Positions in a run."""


FULL: Final = Plan(
    every_size_up_to=5_000,
    around_powers_up_to=10_000_000,
    whole=((10, 1_000), (25, 1_000), (100, 1_000), (1_000, 1_000), (9_801, 1_000), (10_000, 1_000), (1_000_000, 30)),
    sampled=(10**9 + 7, 2**30, 10**12 + 39),
    sampled_seeds=30,
    num_runs=64,
    run_length=4_096,
)
"""The counts that the documentation quotes: some minutes."""

SHORT: Final = Plan(
    every_size_up_to=300,
    around_powers_up_to=100_000,
    whole=((10, 200), (25, 200), (100, 200), (1_000, 100), (10_000, 20)),
    sampled=FULL.sampled,
    sampled_seeds=4,
    num_runs=8,
    run_length=4_096,
)
"""Some seconds, for the ordinary tests."""

_FEWEST_FOR_CELLS: Final = 100
"""From this size on the statistics that need several images in each cell are made."""


def statistics(shuffle: Shuffle, plan: Plan, *, seed_bits: int = 64) -> Iterator[Statistic]:
    """All statistics of a shuffle, of which the first `seed_bits` bits of the seed matter."""
    yield from bijections(shuffle, plan)
    for size, num_seeds in plan.whole:
        yield from of_whole(shuffle, size, num_seeds, seed_bits=seed_bits)
    for size in plan.sampled:
        yield from of_sampled(shuffle, size, plan, seed_bits=seed_bits)


def bijections(shuffle: Shuffle, plan: Plan) -> Iterator[Statistic]:
    """Whether every image comes once, at many sizes."""
    yield bijection(shuffle, range(1, plan.every_size_up_to + 1), seed=1)
    yield bijection(shuffle, around_powers((2, 3, 4, 10), plan.around_powers_up_to), seed=2)


def of_whole(shuffle: Shuffle, size: int, num_seeds: int, *, seed_bits: int = 64) -> Iterator[Statistic]:
    """Statistics of whole permutations."""
    runs = list(whole(shuffle, size, range(num_seeds)))
    yield positions(runs)
    yield batch_composition(runs)
    yield same_block_neighbours(runs)
    yield from inversions(runs)
    yield from _of_lags(runs, size)
    if size >= _FEWEST_FOR_CELLS:
        per_seed = max(1, size // 500)
        yield from avalanche(shuffle, size, range(num_seeds), per_seed=per_seed, seed_bits=seed_bits)


def of_sampled(shuffle: Shuffle, size: int, plan: Plan, *, seed_bits: int = 64) -> Iterator[Statistic]:
    """Statistics of runs of positions, consecutive and a square root of the size apart."""
    seeds = range(plan.sampled_seeds)
    for stride in (1, _side(size)):
        runs = list(sampled(shuffle, size, seeds, num_runs=plan.num_runs, length=plan.run_length, stride=stride))
        found = [*images_of_runs(runs), batch_composition(runs), same_block_neighbours(runs), *inversions(runs)]
        found += [differences(runs), short_steps(runs), serial_correlation(runs)]
        note = "" if stride == 1 else f", stride {stride:,}"
        yield from (replace(statistic, name=statistic.name + note) for statistic in found)
    yield from avalanche(shuffle, size, seeds, per_seed=2_048, seed_bits=seed_bits)


def _of_lags(runs: list[Runs], size: int) -> Iterator[Statistic]:
    for lag in (1, 2, _side(size)):
        yield serial_correlation(runs, lag=lag)
        yield short_steps(runs, lag=lag)
        if size >= _FEWEST_FOR_CELLS:
            yield differences(runs, lag=lag)


def _side(size: int) -> int:
    """The length of a row of the grid that Trackbed's network is on: what that might betray.

    >>> _side(10_000), _side(9_801), _side(10**12 + 39)
    (100, 99, 999999)
    """
    rows = math.isqrt(size - 1) + 1
    return -(-size // (rows + rows % 2))
