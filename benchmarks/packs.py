"""`python -m benchmarks.packs`: what packs of whole documents cost, on one core, as two Markdown tables.

The first one plans packs of lognormal lengths (median 500, sigma 1.2), from the lengths to the first pack, and finds
others at random. The second one reads batches of 8 samples of 4,096 places from the page cache, in turn with stretches
of the same text in the order "instant".
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import machine
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.index.packing import Packs
from trackbed.kernels.packing import PackShape, count_items, plan_packs
from trackbed.loading import BatchStream
from trackbed.tokens import IndexedDatasetBuilder

BATCH, LENGTH, ROUNDS, ROUND = 8, 4096, 7, 60
CASES = ((10**6, 4096, None), (10**7, 32768, None), (10**8, 32768, 100_000))
MEANS = (1000, 150)


def plan(num_documents: int, length: int, window: int | None) -> str:
    """Plans packs; returns a row of the first table."""
    rng = np.random.default_rng(1)
    lengths = np.maximum(1, rng.lognormal(np.log(500), 1.2, num_documents)).astype(np.int32)
    shape = PackShape(length)
    counts = count_items(lengths, shape)
    started = time.perf_counter()
    planned = plan_packs(counts)
    plan_seconds = time.perf_counter() - started
    num_bytes = planned.nodes.nbytes + planned.leaves.nbytes
    started = time.perf_counter()
    packs = Packs(lengths, shape, window=window)
    size = len(packs)
    packs.find([0], keys=[1])
    ready = time.perf_counter() - started
    wanted = rng.integers(0, size, 20_000) if window is None else np.arange(20_000)
    started = time.perf_counter()
    pieces, _ = packs.find(wanted, keys=np.full(len(wanted), 3, dtype=np.uint64))
    of_document = (time.perf_counter() - started) / len(pieces)
    fill = np.maximum(lengths.astype(np.int64) - 1, 0).sum() / (size * length)
    cells = (f"{num_documents:,}", f"{length:,}", f"{window:,}" if window else "all", f"{1e3 * plan_seconds:.1f} ms")
    figures = (f"{num_bytes / 1e6:.1f} MB", f"{ready:.3f} s", f"{1e9 * of_document:.0f} ns", f"{100 * fill:.3f} %")
    return f"| {' | '.join(cells + figures)} |"


def open_dataset(prefix: str, order: str) -> GPTDataset:
    """A corpus as one split."""
    flags = dict.fromkeys(
        ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False
    )
    options: dict[str, Any] = {"random_seed": 1234, "sequence_length": LENGTH, "split": "1", "order": order, **flags}
    config = GPTDatasetConfig(blend=([prefix], None), tokenizer=NullTokenizer(50_000), **options)
    sizes = [BATCH * ROUND * (ROUNDS + 1), 0, 0]
    dataset: GPTDataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
    return dataset


def batches_of(dataset: GPTDataset, layout: Any) -> Iterator[Any]:
    """Batches one after the other."""
    positions = np.arange(len(dataset)).reshape(-1, BATCH).tolist()
    return iter(BatchStream(dataset, positions, num_threads=1, layout=layout))


def read(folder: Path, mean: int) -> str:
    """Reads packs and stretches in turn; returns a row of the second table."""
    rng = np.random.default_rng(mean)
    prefix = str(folder / f"corpus-{mean}")
    lengths = rng.integers(mean // 10, 2 * mean - mean // 10, 60_000_000 // mean)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.add_documents(rng.integers(0, 50_000, int(lengths.sum()), dtype=np.uint16), lengths.astype(np.int32))
    builder.finalize(f"{prefix}.idx")
    streams = {
        "stretches": batches_of(open_dataset(prefix, "instant"), None),
        "packs": batches_of(open_dataset(prefix, "packed"), "thd"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in streams}
    for number in range(ROUNDS + 1):
        for name, stream in streams.items():
            started = time.perf_counter()
            for _ in range(ROUND):
                next(stream)
            if number:
                seconds[name].append(time.perf_counter() - started)
    tokens = ROUND * BATCH * LENGTH
    speeds = {name: tokens / statistics.median(one) / 1e6 for name, one in seconds.items()}
    ratio = speeds["packs"] / speeds["stretches"]
    return f"| {mean:,} | {speeds['stretches']:,.0f} | {speeds['packs']:,.0f} | {ratio:.2f} |"


def main() -> None:
    """Prints the tables."""
    print(f"{machine()}, one core\n")
    print("| documents | places | packed together | plan | its size | to the first pack | a document | fill |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for case in CASES[: 2 if "--short" in sys.argv else 3]:
        print(plan(*case), flush=True)
    print("\n| tokens of a document | stretches, million tokens/s | packs | ratio |\n|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for mean in MEANS:
            print(read(Path(folder), mean), flush=True)


if __name__ == "__main__":
    main()
