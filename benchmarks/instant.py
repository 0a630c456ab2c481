"""`python -m benchmarks.instant`: what the instant order costs, as a Markdown table.

Nobody else has this order, so there is nothing to compare it with: the figures stand against what it promises.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.harness import machine
from trackbed.index import InstantOrder

NUM_SAMPLES = 2_000_000_000
BATCH = 512


@dataclass(frozen=True, slots=True)
class Cost:
    """One row of the table."""

    what: str
    unit: str
    median: float
    promised: float | None
    """The figure it must not exceed, in the same unit."""


def seconds(run: Callable[[], object], *, rounds: int = 9) -> float:
    """Median of some runs, after one that does not count."""
    taken = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def make_order(num_datasets: int) -> InstantOrder:
    rng = np.random.default_rng(num_datasets)
    weights = rng.random(num_datasets) + 1e-3
    sizes = rng.integers(10_000, 10_000_000, num_datasets)
    return InstantOrder(sizes=sizes, weights=weights, seed=1234, num_samples=NUM_SAMPLES)


def run() -> Iterator[Cost]:
    """Every row, in turn."""
    rng = np.random.default_rng(0)
    anywhere = rng.integers(0, NUM_SAMPLES, 1 << 20)
    for num_datasets in (10, 1_000, 10_000):
        name = f"{num_datasets:,} datasets"
        first = seconds(lambda k=num_datasets: make_order(k).locate(range(BATCH)))
        yield Cost(
            f"{name}: construction and first batch of {BATCH}", "ms", first * 1e3, 10 if num_datasets == 1_000 else None
        )
        order = make_order(num_datasets)
        batch = np.arange(10**9, 10**9 + BATCH)
        yield Cost(f"{name}: a batch of {BATCH}", "us", seconds(lambda o=order, b=batch: o.locate(b)) * 1e6, None)
        each = seconds(lambda o=order: o.locate(anywhere)) / len(anywhere)
        yield Cost(f"{name}: a position anywhere, one thread", "ns", each * 1e9, 100)
        yield Cost(
            f"{name}: counts before a position", "us", seconds(lambda o=order: o.counts_before(10**9)) * 1e6, None
        )


def main() -> int:
    """Print the table; 1 if a promise is broken."""
    rows = list(run())
    print(f"Medians, on {machine()}.\n\n| | measured | promised |\n|---|---:|---:|")
    for row in rows:
        promised = "" if row.promised is None else f"{row.promised:g} {row.unit}"
        print(f"| {row.what} | {row.median:.1f} {row.unit} | {promised} |")
    return int(any(row.promised is not None and row.median > row.promised for row in rows))


if __name__ == "__main__":
    sys.exit(main())
