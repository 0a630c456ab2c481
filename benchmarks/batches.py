"""`python -m benchmarks.batches`: batches of 4,096-token samples, against whoever else makes them, as a Markdown table.

All of them take samples one after the other, as a training run does, from the page cache, in one process: batches of
8, in turns, so that a machine that slows down slows everybody. Trackbed writes int64 tokens, labels and positions and a
float32 loss mask into a ring of three batches; the plain slice only makes int64 tokens.
"""

import itertools
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.harness import machine
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.loading import BatchStream
from trackbed.tokens import IndexedDatasetBuilder

BATCH, LENGTH, THREADS, RING = 8, 4096, 2, 3
ROUND = 200
"""Batches of a round."""
NEEDED = {"megatron": 12.0, "instant": 1.0}
"""Times Megatron Core's dataset, and times the plain slice."""
Run = Callable[[], object]


def write_corpus(folder: Path) -> str:
    """60 million tokens, about 7 documents a sample."""
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), np.uint16)
    for length in rng.integers(100, 1100, 100_000):
        builder.add_document(rng.integers(0, 50_000, length, dtype=np.uint16), [length])
    builder.finalize(str(folder / "corpus.idx"))
    return str(folder / "corpus")


def open_dataset(prefix: str, order: str, **options: Any) -> GPTDataset:
    """The corpus as one split."""
    flags = dict.fromkeys(
        ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False
    )
    config = GPTDatasetConfig(
        random_seed=1234,
        blend=([prefix], None),
        split="1",
        path_to_cache=f"{prefix}-cache",
        tokenizer=NullTokenizer(50_000),
        order=order,
        **{"sequence_length": LENGTH, **flags, **options},
    )
    dataset: GPTDataset = BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, config).build()[0]
    return dataset


def open_megatron(prefix: str) -> Any:
    """Megatron Core's dataset over the same files, from the same index."""
    import megatron.core.datasets.blended_megatron_dataset_builder as mc_builder
    import megatron.core.datasets.gpt_dataset as mc_gpt

    from benchmarks.against_megatron import options, theirs_tokenizer

    config = mc_gpt.GPTDatasetConfig(
        sequence_length=LENGTH,
        blend=([prefix], None),
        split="1",
        create_attention_mask=False,
        tokenizer=theirs_tokenizer(),
        **options(Path(f"{prefix}-cache-theirs")),
    )
    return mc_builder.BlendedMegatronDatasetBuilder(mc_gpt.GPTDataset, [None] * 3, lambda: True, config).build()[0]


class Slices(Dataset[torch.Tensor]):
    """The plain way: a slice of a memory map, widened."""

    def __init__(self, prefix: str) -> None:
        self.tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
        self.order = np.random.default_rng(1).permutation((len(self.tokens) - 1) // LENGTH)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> torch.Tensor:
        start = int(self.order[position]) * LENGTH
        return torch.from_numpy(self.tokens[start : start + LENGTH + 1].astype(np.int64))


def batches(num_samples: int) -> Iterator[list[int]]:
    """Indices of one batch after the other, round and round."""
    for first in itertools.cycle(range(0, num_samples - BATCH, BATCH)):
        yield list(range(first, first + BATCH))


def gather(dataset: GPTDataset) -> Run:
    """`dataset.gather` into a ring."""
    ring = [dataset.gather(range(BATCH)) for _ in range(RING)]
    indices = batches(len(dataset))

    def run() -> None:
        for step in range(ROUND):
            dataset.gather(next(indices), ring[step % RING], num_threads=THREADS)

    return run


def take(items: Iterator[Any]) -> Run:
    """Whatever an iterator gives."""

    def run() -> None:
        for _ in range(ROUND):
            next(items)

    return run


def one_by_one(samples: Any, collate: Callable[[list[Any]], object]) -> Run:
    """Each sample by its position."""
    indices = batches(len(samples))

    def run() -> None:
        for _ in range(ROUND):
            collate([samples[position] for position in next(indices)])

    return run


def fill(dataset: GPTDataset) -> Run:
    """What it takes to write something to the same memory."""
    ring = [dataset.gather(range(BATCH)) for _ in range(RING)]

    def run() -> None:
        for step in range(ROUND):
            for tensor in ring[step % RING].values():
                tensor.fill_(1)

    return run


def as_in_megatron(samples: Any) -> DataLoader[Any]:
    """The loader of a Megatron-LM job, with its two worker processes."""
    return DataLoader(samples, batch_sampler=batches(len(samples)), num_workers=2, persistent_workers=True)


def grain_loader(slices: Slices) -> Iterator[Any] | None:
    """Grain over the same slices, without threads of its own, which is quickest; None where it is not installed."""
    try:
        import grain
    except ModuleNotFoundError:
        return None
    source = grain.MapDataset.source(slices).repeat().batch(BATCH, batch_fn=np.stack)
    return iter(source.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def grain_over_micro_batches(dataset: GPTDataset) -> Iterator[Any] | None:
    """`trackbed.adapters.grain`, again and again; None where Grain is not installed."""
    try:
        from trackbed.adapters.grain import MicroBatches, batch_iterator
    except ModuleNotFoundError:
        return None
    source = MicroBatches(dataset, BATCH, num_threads=THREADS)
    passes = (batch_iterator(source, micro_batches_per_step=1, rank=0, num_ranks=1) for _ in itertools.count())
    return itertools.chain.from_iterable(passes)


def warm_up(contestants: Mapping[str, Run], num_samples: int) -> None:
    """Let everybody go through all samples once: who maps a file pays for a page when it is first touched."""
    for name, run in contestants.items():
        print(f"warming up: {name}", file=sys.stderr)
        for _ in range(num_samples // (BATCH * ROUND) + 1):
            run()


def rates(contestants: Mapping[str, Run], *, items: int, rounds: int = 9) -> dict[str, float]:
    """Median items a second of each, in turns, after a round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 1):
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - started)
    return {name: items / statistics.median(taken) for name, taken in seconds.items()}


def contestants(prefix: str) -> dict[str, Run]:
    """Everybody, by name."""
    datasets = {order: open_dataset(prefix, order) for order in ("megatron", "instant")}
    slices = Slices(prefix)
    found: dict[str, Run] = {"fill": fill(datasets["megatron"])}
    for order, dataset in datasets.items():
        found[f"gather, {order}"] = gather(dataset)
        loader = BatchStream(dataset, batches(len(dataset)), ahead=RING - 1, num_threads=THREADS)
        found[f"BatchLoader, {order}"] = take(iter(loader))
    found["plain slice"] = one_by_one(slices, list)
    found["DataLoader over the slice"] = take(
        iter(DataLoader(slices, BATCH, sampler=itertools.cycle(range(len(slices)))))
    )
    if (grain := grain_loader(slices)) is not None:
        found["Grain over the slice"] = take(grain)
    if (records := grain_over_micro_batches(datasets["instant"])) is not None:
        found["Grain over micro-batches, instant"] = take(records)
    theirs = open_megatron(prefix)
    found["megatron-core"] = one_by_one(theirs, default_collate)
    for name, samples in (("Trackbed's", datasets["megatron"]), ("megatron-core's", theirs)):
        found[f"DataLoader, 2 workers, over {name} dataset"] = take(iter(as_in_megatron(samples)))
    return found


def mask_cost(prefix: str) -> float:
    """How many times as long as the bare write of a mask a batch with `reset_attention_mask` takes."""
    dataset = open_dataset(prefix, "megatron", reset_attention_mask=True, create_attention_mask=True)
    batch = dataset.gather(range(2))
    found = rates(
        {
            "batch": lambda: dataset.gather(range(2), batch, num_threads=THREADS),
            "bare": lambda: batch["attention_mask"].fill_(1),
        },
        items=1,
        rounds=15,
    )
    return found["bare"] / found["batch"]


def stall_share(prefix: str) -> float:
    """Part of a small GPT's training loop that is spent waiting for batches."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from model import GPT, ModelConfig

    dataset = open_dataset(prefix, "megatron", sequence_length=128)
    model = GPT(ModelConfig(vocab_size=50_001, sequence_length=128, layers=2))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = BatchStream(dataset, batches(len(dataset)))
    started, waited = time.perf_counter(), 0.0
    for step, batch in enumerate(loader):
        if step == 1:  # the first one waits for the files, too
            started, waited = time.perf_counter(), loader.counters.stall_seconds
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 20:
            break
    return (loader.counters.stall_seconds - waited) / (time.perf_counter() - started)


def report(prefix: str) -> bool:
    """Print the table; whether everything that is needed holds."""
    everybody = contestants(prefix)
    warm_up(everybody, len(Slices(prefix)))
    found = rates(everybody, items=ROUND * BATCH)
    bytes_ = BATCH * LENGTH * (3 * 8 + 4) / BATCH
    print(f"Medians of rounds in turn, on {machine()}, {THREADS} threads.\n")
    print("| | samples/s | GB/s written | times megatron-core | times plain slice |\n|---|---:|---:|---:|---:|")
    for name, rate in found.items():
        written = f"{rate * bytes_ / 1e9:.1f}" if name.startswith(("fill", "gather", "Batch")) else ""
        times = rate / found["megatron-core"], rate / found["plain slice"]
        print(f"| {name} | {rate:,.0f} | {written} | {times[0]:.1f} | {times[1]:.2f} |")
    mask, stall = mask_cost(prefix), stall_share(prefix)
    print(f"\nA batch with `reset_attention_mask` takes {mask:.2f} times the bare write of its mask (at most 2).")
    print(f"A small GPT's training loop waits for batches {stall:.2%} of its time (less than 1 %).")
    is_fast = found["gather, megatron"] >= NEEDED["megatron"] * found["megatron-core"]
    return is_fast and found["gather, instant"] > found["plain slice"] and mask <= 2 and stall < 0.01


def main() -> int:
    """Measure; 1 if something that is needed does not hold."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(prefix="trackbed-batches-") as folder:
        return int(not report(write_corpus(Path(folder))))


if __name__ == "__main__":
    sys.exit(main())
