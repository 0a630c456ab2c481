"""`python -m benchmarks.accelerate`: building a blend through megatron-core, with `accelerate()` and without.

1,000 datasets of 2e8 documents in all, from a twentieth to fifty times as many as the average, weighted by their sizes;
cold: a new folder as `path_to_cache` each time, and the pairs in the page cache. Medians of rounds in one process a
rank, in which the ways alternate; the files of all are compared in the end. `--datasets 50` is a short try; all of it
takes 12 GB of disk and some minutes.
"""

import argparse
import filecmp
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers import MegatronTokenizer

import trackbed.megatron
from benchmarks.harness import machine, run_on_ranks
from benchmarks.starts import make_pairs

SEQUENCE_LENGTH: Final = 4096
THEIRS, FUNCTIONS, OURS = "megatron-core alone", "with its faster functions alone", "with `accelerate()`"

_own_build = BlendedMegatronDatasetBuilder.build


@dataclass(frozen=True, slots=True)
class Work:
    """What is built."""

    prefixes: list[str]
    num_samples: int
    """Of the training split."""
    threads: int


def spread(num_datasets: int, average: int) -> npt.NDArray[np.int64]:
    """`[num_datasets]` documents of each, evenly spread in their logarithms."""
    drawn = np.exp(np.random.default_rng(0).uniform(np.log(0.05), np.log(50), num_datasets))
    return np.maximum(drawn * average / drawn.mean(), 1_000).astype(np.int64)


def build(work: Work, cache: Path, how: Callable[[Any], object]) -> float:
    """Seconds of all three splits, on the slowest rank."""
    weights = [float(Path(f"{prefix}.bin").stat().st_size) for prefix in work.prefixes]
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE_LENGTH,
        blend=(work.prefixes, weights),
        split="98,1,1",
        path_to_cache=str(cache),
        num_dataset_builder_threads=work.threads,
        mid_level_dataset_surplus=0.05,  # the smallest are drawn from by chance, a few samples more or less
        tokenizer=MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=50_000),
        **flags,
    )
    sizes = [work.num_samples, work.num_samples // 100, work.num_samples // 100]
    os.sync()  # what was written before
    dist.barrier()
    started = time.perf_counter()
    how(BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config))
    dist.barrier()
    return time.perf_counter() - started


def timed(way: str, work: Work, cache: Path) -> float:
    """Seconds of one way."""
    if way == THEIRS:
        return build(work, cache, _own_build)
    found = trackbed.megatron.accelerate()
    try:
        how = _own_build if way == FUNCTIONS else BlendedMegatronDatasetBuilder.build
        return build(work, cache, how)
    finally:
        found.undo()


def count_equal(first: Path, second: Path) -> int:
    """Number of files, which must be the same in both folders.

    Raises:
        SystemExit: they are not.
    """
    names, others = ({path.name for path in folder.iterdir() if path.is_file()} for folder in (first, second))
    _, unlike, lost = filecmp.cmpfiles(first, second, names | others, shallow=False)
    if unlike or lost:
        raise SystemExit(f"{second}: files must be those of {first}, found others: {[*unlike, *lost][:3]}")
    return len(names)


def run_rank(folder: Path, options: argparse.Namespace) -> None:
    """All rounds on one rank; rank 0 makes the pairs, and prints the table."""
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    if is_first:
        make_pairs(folder / "pairs", spread(options.datasets, options.documents))
        os.sync()
    dist.barrier()
    prefixes = sorted(str(path.with_suffix("")) for path in (folder / "pairs").glob("*.idx"))
    tokens = sum(Path(f"{prefix}.bin").stat().st_size for prefix in prefixes) // 2
    work = Work(prefixes, int(0.9 * tokens / SEQUENCE_LENGTH), options.threads)
    ways = (THEIRS, FUNCTIONS, OURS)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds):
        for way in ways[:: -1 if number % 2 else 1]:
            cache = folder / f"{ways.index(way)}-{number}"
            seconds[way].append(timed(way, work, cache))
    if is_first:
        compared = [count_equal(folder / "0-0", folder / f"{number}-0") for number in (1, 2)]
        medians = {way: statistics.median(found) for way, found in seconds.items()}
        print(
            f"{options.datasets:,} datasets of {options.documents:,} documents on average, {work.num_samples:,} "
            f"samples of {SEQUENCE_LENGTH:,} tokens for training; ranks: {dist.get_world_size()}, threads: "
            f"{work.threads}, rounds: {options.rounds}; {machine()}. {min(compared):,} files are the same in all "
            "ways.\n\n"
            "| | seconds | times faster |\n|---|---:|---:|"
        )
        for way, median in medians.items():
            print(f"| {way} | {median:.3g} | {medians[THEIRS] / median:.1f} |")
    dist.destroy_process_group()


def main() -> int:
    """Run all rounds on as many ranks as are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datasets", type=int, default=1_000)
    parser.add_argument("--documents", type=int, default=200_000, help="documents of a dataset on average")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="num_dataset_builder_threads")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", help="where pairs and caches are written, by default the system's place")
    options = parser.parse_args()
    if "TRACKBED_BENCH_FOLDER" not in os.environ:
        return run_on_ranks("benchmarks.accelerate", options.ranks, options.folder)
    run_rank(Path(os.environ["TRACKBED_BENCH_FOLDER"]), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
