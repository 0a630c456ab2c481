"""`python -m benchmarks.full`: the headlines, written to RESULTS.md.

2 billion samples over 1,000 datasets, in each order; builders of 1,000 datasets with their ranks; a start over 5e12
tokens. Every row runs in processes of its own, one after the other; figures of others are quoted as such. Takes half an
hour and 55 GB of disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import starts, trillions
from benchmarks.harness import machine
from trackbed.cache import Allocate, Arrays, ArraySpec, Entry, Kind, Request, build_batch
from trackbed.datasets.blend.balanced import BalancedOrder
from trackbed.datasets.blend.order import BlendSpec
from trackbed.datasets.config import BlendedMegatronDatasetConfig
from trackbed.index import InstantOrder, Split, greedy_blend

NUM_DATASETS: Final = 1_000
ARRAYS: Final = ("dataset_index", "dataset_sample_index")
RESULTS: Final = Path(__file__).with_name("RESULTS.md")
_NEEDED_BYTES: Final = 12.5


def weights() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Uniform in [0, 1), divided by their sum."""
    drawn = np.random.default_rng(1).random(NUM_DATASETS)
    return drawn / drawn.sum()


@dataclass(frozen=True)
class _Greedy:
    """A blend without datasets."""

    num_samples: int

    def build(self, allocate: Allocate) -> Arrays:
        """Draws the blend."""
        poll = lambda done: allocate.filled(done, *ARRAYS)  # noqa: E731
        made = greedy_blend(weights(), self.num_samples, allocate=allocate, poll=poll)
        return dict(zip(ARRAYS, made, strict=True))

    def expected(self) -> dict[str, ArraySpec]:
        """Dtypes and shapes."""
        shape = (self.num_samples,)
        return {name: ArraySpec(np.dtype(dtype), shape) for name, dtype in zip(ARRAYS, ("i2", "i8"), strict=True)}

    def cost(self) -> float:
        """Nothing is scheduled."""
        return 0.0


def in_megatrons_order(folder: Path, num_samples: int) -> dict[str, float]:
    """The blend as `BlendedDataset` builds and keeps it: drawn, checksummed, on the disk."""
    entry = Entry(directory=folder, stem="blend", description="", arrays=ARRAYS, decisions={"n": num_samples})
    request = Request(entry, Kind(is_blend=True), _Greedy(num_samples))
    return timed(lambda: list(build_batch([request])))


def in_the_balanced_order(folder: Path, num_samples: int) -> dict[str, float]:
    """The blend with every index in a mapped file, checksummed, on the disk."""
    prefixes = [str(number) for number in range(NUM_DATASETS)]
    config = BlendedMegatronDatasetConfig(
        random_seed=1234,
        sequence_length=1,
        blend=(prefixes, weights().tolist()),
        split="1",
        path_to_cache=str(folder),
        order="balanced",
    )

    def make() -> None:
        members: list[Any] = [None] * NUM_DATASETS  # the order does not depend on them
        order = BalancedOrder(BlendSpec(members, weights().tolist(), num_samples, Split.train, config))
        request = order.request(lambda: None)
        list(build_batch([] if request is None else [request]))

    return timed(make)


def in_the_instant_order(_folder: Path, num_samples: int) -> dict[str, float]:
    """From the weights to the first batch of 512; and any position afterwards."""
    sizes = np.full(NUM_DATASETS, 5 * num_samples // NUM_DATASETS)

    def make() -> InstantOrder:
        order = InstantOrder(sizes=sizes, weights=weights(), seed=1234, num_samples=num_samples)
        order.locate(range(512))
        return order

    make()
    figures = timed(make)
    anywhere = np.random.default_rng(0).integers(0, num_samples, 1 << 20)
    order = make()
    position = timed(lambda: order.locate(anywhere))
    return {**figures, "position_nanoseconds": position["seconds"] / len(anywhere) * 1e9}


def by_megatron_core(_folder: Path, num_samples: int) -> dict[str, float]:
    """megatron-core's helper on a two-thousandth of the samples; the rest is multiplication."""
    from megatron.core.datasets import helpers

    part = num_samples // 2_000
    datasets, samples = np.zeros(part, np.int16), np.zeros(part, np.int64)
    figures = timed(
        lambda: helpers.build_blending_indices(datasets, samples, weights().tolist(), NUM_DATASETS, part, False)
    )
    return {**figures, "seconds": figures["seconds"] * num_samples / part}


def by_grain(_folder: Path, num_samples: int) -> dict[str, float]:
    """Grain's `MapDataset.mix` of shuffled ranges: making it, the first batch of 512, and any position afterwards."""
    import grain

    def make() -> Any:
        size = 5 * num_samples // NUM_DATASETS
        parts = [grain.MapDataset.range(size).shuffle(seed=number) for number in range(NUM_DATASETS)]
        mixed = grain.MapDataset.mix(parts, weights().tolist())
        for position in range(512):
            mixed[position]
        return mixed

    figures = timed(make)
    mixed = make()
    anywhere = np.random.default_rng(0).integers(0, num_samples, 2_000).tolist()
    position = timed(lambda: [mixed[each] for each in anywhere])
    return {**figures, "position_nanoseconds": position["seconds"] / len(anywhere) * 1e9}


def timed(run: Callable[[], object]) -> dict[str, float]:
    """Seconds that it takes, flushed to the disk, and the process's largest memory, mapped pages included."""
    started = time.perf_counter()
    run()
    os.sync()
    seconds = time.perf_counter() - started
    status = Path("/proc/self/status").read_text()
    return {"seconds": seconds, "peak_gib": int(status.partition("VmHWM:")[2].split()[0]) / 2**20}


RUNS: Final[dict[str, Callable[[Path, int], dict[str, float]]]] = {
    "megatron-core 0.16.1, one thread (extrapolated from 1/2,000)": by_megatron_core,
    'Trackbed, `order="megatron"`, one thread, index on disk': in_megatrons_order,
    'Trackbed, `order="balanced"`, index on disk': in_the_balanced_order,
    'Trackbed, `order="instant"`, to the first batch of 512': in_the_instant_order,
    "Grain, `MapDataset.mix` of `shuffle`, to the first batch of 512": by_grain,
}
_QUOTED: Final = "| the article, the balanced algorithm, on a cluster (quoted) | 18 | | |"


def run_apart(name: str, folder: Path, num_samples: int) -> dict[str, float]:
    """One row in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.full", "--only", name, str(folder), "--samples", str(num_samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: dict[str, dict[str, float]], num_samples: int) -> str:
    """The rows in Markdown."""
    lines = [
        "# Two billion samples over a thousand datasets",
        "",
        f"Written by `make bench-full`: {num_samples:,} samples, {NUM_DATASETS:,} datasets of random weights,",
        f"on {machine()}.",
        "Trackbed's indices are checksummed and flushed to the disk when the clock stops; peak memory counts mapped",
        "pages.",
        "",
        "| | seconds | peak GiB | ns a position, anywhere, one thread |",
        "|---|---:|---:|---:|",
    ]
    for name, figures in rows.items():
        each = figures.get("position_nanoseconds")
        seconds = figures["seconds"]
        shown = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
        lines.append(f"| {name} | {shown} | {figures['peak_gib']:.1f} | {'' if each is None else f'{each:,.0f}'} |")
    return "\n".join([*lines, _QUOTED, ""])


def _starts() -> str:
    with tempfile.TemporaryDirectory(prefix="trackbed-starts-") as scratch:
        found = starts.table(list(starts.rows(Path(scratch), full=True)))
    return f"# Starts of many datasets, three splits\n\n{starts.LEGEND}\n\n{found}\n"


def _trillions() -> str:
    with tempfile.TemporaryDirectory(prefix="trackbed-trillions-") as scratch:
        return trillions.table(trillions.run(Path(scratch)))


def main() -> int:
    """Run all rows, or the one that a parent asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2_000_000_000)
    parser.add_argument("--only", nargs=2, metavar=("ROW", "FOLDER"))
    options = parser.parse_args()
    if options.only:
        print(json.dumps(RUNS[options.only[0]](Path(options.only[1]), options.samples)))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="trackbed-bench-"))
    try:
        free, needed = shutil.disk_usage(folder).free, _NEEDED_BYTES * options.samples
        if free < needed:
            print(f"{folder}: must have {needed / 1e9:.0f} GB free, found {free / 1e9:.0f}", file=sys.stderr)
            return 1
        rows = {}
        for number, name in enumerate(RUNS):
            try:
                rows[name] = run_apart(name, folder / str(number), options.samples)
            except SystemExit as failure:
                if "No module named 'grain'" not in str(failure):
                    raise
                print("grain is not installed (the extra 'grain'): left out", file=sys.stderr)
                continue
            shutil.rmtree(folder / str(number), ignore_errors=True)
            print(f"{name}: {rows[name]['seconds']:.3g} s", file=sys.stderr)
    finally:
        shutil.rmtree(folder)
    text = table(rows, options.samples)
    if options.samples == 2_000_000_000:
        text += f"\n{_starts()}\n{_trillions()}"
    print(text)
    if options.samples == 2_000_000_000:
        RESULTS.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
