"""`python -m benchmarks.packs`: what packs of whole documents cost, on one core, as Markdown tables.

The first one plans packs of lognormal lengths (median 500, sigma 1.2), from the lengths to the first pack, and finds
others at random. The second one reads batches of 8 samples of 4,096 places from the page cache, in turn with stretches
of the same text in the order "instant". The third one deals the packs of global batches to ranks, with and without
balance: the highest cost of a rank over the mean, in a step and where ranks wait for each other at each pack; and the
time that a rank takes for the assignment of a global batch. The last one packs the same lengths with trl, if it is
installed, in turn with Trackbed: from the lengths to the documents of all packs; trl copies the tokens besides.
"""

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import machine
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.index import InstantOrder
from trackbed.index.pack_costs import CostTables
from trackbed.index.packing import Packs
from trackbed.index.rank_shuffle import part_of_rank
from trackbed.kernels.pack_balance import deal_packs
from trackbed.kernels.packing import PackShape, count_items, plan_packs
from trackbed.loading import BatchStream
from trackbed.tokens import IndexedDatasetBuilder

BATCH, LENGTH, ROUNDS, ROUND = 8, 4096, 7, 60
RANKS, HIDDEN, STEPS = 512, 4096, 20
CASES = ((10**6, 4096, None), (10**7, 32768, None), (10**8, 32768, 100_000))
MEANS = (1000, 150)
PEER_DOCUMENTS, PEER_ROUNDS = 100_000, 3


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


def lengths_of(kind: str, size: int) -> npt.NDArray[np.int32]:
    """Lengths of conversations, or of text a part of which is long."""
    rng = np.random.default_rng(7)
    if kind == "sft":
        drawn = rng.lognormal(np.log(500), 1.2, size)
    else:
        is_long = rng.random(size) < 0.03
        drawn = rng.lognormal(np.where(is_long, np.log(40_000), np.log(1_500)), 0.8)
    return np.maximum(2, drawn).astype(np.int32)


def balance(kind: str, packs_of_rank: int) -> str:
    """Deals the packs of some steps; returns a row of the third table."""
    packs = Packs(lengths_of(kind, 10**7), PackShape(32768))
    order = InstantOrder(sizes=[len(packs)], weights=[1], seed=1, num_samples=len(packs))
    tables = CostTables(packs, hidden_size=HIDDEN)
    size = RANKS * packs_of_rank
    found: list[tuple[float, ...]] = []
    seconds = []
    for step in range(min(STEPS, len(packs) // size)):
        started = time.perf_counter()
        _, visits = order.locate_visits(np.arange(step * size, (step + 1) * size))
        costs = tables.find(visits)
        dealt = deal_packs(costs, RANKS)
        part_of_rank(7, RANKS, seed=1, position=step * size)
        seconds.append(time.perf_counter() - started)
        plain = costs.reshape(packs_of_rank, RANKS)
        of_turns = [one.max(axis=1).sum() / one.mean(axis=1).sum() for one in (plain, costs[dealt])]
        loads = [one.sum(axis=0) for one in (plain, costs[dealt])]
        found.append((*(one.max() / one.mean() for one in loads), *of_turns))
    worst = np.max(found, axis=0).tolist()
    cells = (kind, str(packs_of_rank), *(f"{one:.3f}" for one in worst), f"{1e3 * statistics.median(seconds):.2f} ms")
    return f"| {' | '.join(cells)} |"


def against_trl() -> Iterator[str]:
    """Packs the same documents with trl and with Trackbed in turn; yields the rows of the last table."""
    import datasets
    import pyarrow as pa
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    rng = np.random.default_rng(1)
    lengths = np.maximum(1, rng.lognormal(np.log(500), 1.2, PEER_DOCUMENTS)).astype(np.int32)
    offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
    tokens = pa.array(np.zeros(offsets[-1], dtype=np.int32))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), tokens)})
    packed: dict[str, tuple[int, int]] = {}
    seconds: dict[str, list[float]] = {"Trackbed": [], "trl": [], "trl, all in one batch": []}
    for number in range(PEER_ROUNDS):
        for name in list(seconds)[:: 1 if number % 2 else -1]:
            options = {} if name == "trl" else {"batch_size": PEER_DOCUMENTS}
            dataset = datasets.Dataset(table, fingerprint=f"{name}-{number}")  # else it is hashed
            started = time.perf_counter()
            if name == "Trackbed":
                packs = Packs(lengths, PackShape(LENGTH, long_documents="cut"))
                pieces, _ = packs.find(np.arange(len(packs)), keys=np.full(len(packs), number, dtype=np.uint64))
            else:
                made = pack_dataset(dataset, LENGTH, "bfd", map_kwargs=options)
            seconds[name].append(time.perf_counter() - started)
            if name == "Trackbed":
                packed[name] = len(packs), int((pieces[:, 2] - pieces[:, 1]).sum())
            else:
                packed[name] = len(made), int(np.minimum(lengths, LENGTH).sum())
    ours = statistics.median(seconds["Trackbed"])
    for name, taken in seconds.items():
        num_packs, places = packed[name]
        median = statistics.median(taken)
        cells = (name, f"{median:.3f} s", f"{1e9 * median / PEER_DOCUMENTS:,.0f} ns", f"{median / ours:,.0f}")
        yield f"| {' | '.join(cells)} | {num_packs:,} | {100 * places / (num_packs * LENGTH):.2f} % |"


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
    print(f"\n| lengths, {RANKS} ranks | packs of a rank | step | balanced | by pack | balanced | assignment |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind in ("sft", "long"):
        for packs_of_rank in (4, 16):
            print(balance(kind, packs_of_rank), flush=True)

    if importlib.util.find_spec("trl") is None:
        print("\ntrl is not installed, so it is not compared")
        return
    print(f"\n| {PEER_DOCUMENTS:,} documents, {LENGTH:,} places | median | a document | times | packs | fill |")
    print("|---|---:|---:|---:|---:|---:|")
    for row in against_trl():
        print(row, flush=True)


if __name__ == "__main__":
    main()
