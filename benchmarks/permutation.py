"""`python -m benchmarks.permutation`: nanoseconds an index of the keyed permutation, as a Markdown table."""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.harness import machine
from trackbed.index import BlockPermutation, Permutation
from trackbed.kernels import available_levels

SIZES: Final = (10, 100, 1_000, 1_024, 5_000, 10**6, 10**9 + 7, 10**12 + 39)
POSITIONS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Cost:
    """One row: what one index costs at each level, in nanoseconds."""

    what: str
    by_level: dict[str, float]


def costs(*, rounds: int = 15) -> Iterator[Cost]:
    """Positions in random order, of permutations of several sizes; the baseline is a scalar loop."""
    for size in SIZES:
        positions = np.random.default_rng(0).integers(0, size, POSITIONS)
        yield _cost(f"{size:,}", Permutation(size, seed=5), positions, rounds)
    size = 10**9 + 7
    ahead = np.arange(POSITIONS)
    blocks = BlockPermutation(size, seed=5, block=64, window=1_024)
    yield _cost(f"{size:,}, blocks of 64, windows of 1,024, positions in order", blocks, ahead, rounds)


def table(rows: list[Cost]) -> str:
    """The rows as a Markdown table."""
    levels = available_levels()
    lines = ["| size | " + " | ".join(f"{level}, ns" for level in levels) + " |", "|---|" + "---:|" * len(levels)]
    lines += [f"| {row.what} | " + " | ".join(f"{row.by_level[level]:.1f}" for level in levels) + " |" for row in rows]
    return "\n".join(lines)


def _cost(what: str, shuffle: Permutation | BlockPermutation, positions: np.ndarray, rounds: int) -> Cost:
    seconds: dict[str, list[float]] = {level: [] for level in available_levels()}
    for round_ in range(rounds + 1):
        for level, times in seconds.items():
            with _level(level):
                started = time.perf_counter()
                shuffle(positions)
                if round_ > 0:
                    times.append(time.perf_counter() - started)
    return Cost(what, {level: statistics.median(times) / len(positions) * 1e9 for level, times in seconds.items()})


@contextmanager
def _level(level: str) -> Iterator[None]:
    before = os.environ.get("TRACKBED_ISA")
    os.environ["TRACKBED_ISA"] = level
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRACKBED_ISA"]
        else:
            os.environ["TRACKBED_ISA"] = before


def main() -> int:
    """Measure and print."""
    print(f"Medians on one thread of {machine()}, positions checked.\n\n{table(list(costs()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
