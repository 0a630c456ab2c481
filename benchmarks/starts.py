"""`python -m benchmarks.starts`: the builder against megatron-core's, with as many ranks, in fresh processes.

Each figure is the median of runs that alternate. The floor is what it costs to write and rename fresh files of the same
sizes as the cache's. Not within six minutes after thousands of files were removed: ext4 without a journal takes none of
the inodes that were freed since, and looks at each of them for every new file.
`--full` takes 1,000 datasets of 10,000 to 10 million documents, and 200 of them, 12 GB of disk
and a quarter of an hour.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.harness import machine

SEQUENCE_LENGTH: Final = 4096
LEGEND: Final = (
    f"Medians of runs that alternate, each rank a fresh process, on {machine()}.\nThe floor: writing and renaming "
    "fresh files of the cache's sizes. MiB: what a rank takes at its peak above what importing took."
)
NUM_DATASETS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Start:
    """One way of starting a job."""

    what: str
    folder: Path
    """Holds `NUM_DATASETS` pairs."""
    train_samples: int
    every: int = 1
    """From one pair that is taken to the next one."""
    ranks: int = 1
    threads: int = 1
    cores: int | None = None
    """How many all ranks may use together, if not all."""
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Times:
    """Medians, in seconds; and MiB that a rank took above what importing took, at its peak."""

    start: Start
    cold: dict[str, float]
    warm: dict[str, float]
    peak: dict[str, float]
    floor: float


def make_pairs(folder: Path, documents: npt.NDArray[np.int64]) -> None:
    """Pairs of so many documents, 600 tokens each on average, whose `.bin` files take no room."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(600) - 0.5, 1.0, int(documents.max())), 50_000).astype("<i4") + 1
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    borders = np.arange(len(lengths) + 1, dtype="<i8")
    for number, count in enumerate(documents.tolist()):
        with (folder / f"pair{number:04d}.idx").open("wb") as file:
            file.write(b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08")
            file.write(np.array([count, count + 1], "<u8").tobytes())
            for array in (lengths[:count], np.append(0, ends[: count - 1]), borders[: count + 1]):
                array.tofile(file)
        with (folder / f"pair{number:04d}.bin").open("wb") as file:
            file.truncate(int(ends[count - 1]))


def spread(low: float, high: float, total: float) -> npt.NDArray[np.int64]:
    """`[NUM_DATASETS]` sizes, evenly spread in their logarithms, scaled to a sum of about `total`."""
    sizes = np.exp(np.random.default_rng(0).uniform(np.log(low), np.log(high), NUM_DATASETS))
    for _ in range(50):
        sizes = np.clip(sizes * total / sizes.sum(), low, high)
    return sizes.astype(np.int64)


def measure(start: Start, scratch: Path) -> Times:
    """Cold and warm starts of both, one after the other."""
    found: dict[str, dict[str, list[float]]] = {
        what: {"trackbed": [], "megatron": []} for what in ("cold", "warm", "peak")
    }
    floors = []
    for number in range(start.rounds):
        for library in ("trackbed", "megatron")[:: 1 if number % 2 else -1]:
            cache = scratch / f"{library}{number}"
            cold = run_ranks(start, library, cache)
            found["cold"][library].append(max(one["seconds"] for one in cold))
            found["peak"][library].append(max(one["peak"] for one in cold))
            found["warm"][library].append(max(one["seconds"] for one in run_ranks(start, library, cache)))
        floors.append(floor_seconds(scratch / f"trackbed{number}", scratch / f"floor{number}"))
        for used in scratch.iterdir():
            # Emptied, not removed: a file system that has just lost thousands of files is slow to make new ones.
            for path in used.rglob("*"):
                if path.is_file() and path.stat().st_size > 1 << 16:
                    os.truncate(path, 0)
    medians = {
        what: {library: statistics.median(values) for library, values in by_library.items()}
        for what, by_library in found.items()
    }
    return Times(start, medians["cold"], medians["warm"], medians["peak"], statistics.median(floors))


def run_ranks(start: Start, library: str, cache: Path) -> list[dict[str, float]]:
    """What each rank of a start measured: the pairs are in the page cache, and nothing is yet to be written."""
    os.sync()
    with tempfile.TemporaryDirectory() as meeting:
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-W", "ignore", "-m", "benchmarks.starts", "--rank", str(rank)),
                    json.dumps(
                        {
                            "library": library,
                            "folder": str(start.folder),
                            "cache": str(cache),
                            "train_samples": start.train_samples,
                            "every": start.every,
                            "ranks": start.ranks,
                            "threads": start.threads,
                            "cores": start.cores,
                            "meeting": meeting,
                        }
                    ),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(start.ranks)
        ]
        said = [process.communicate() for process in processes]
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(
                f"a rank of {library} must end well, found {process.returncode}:\n{errors.decode()[-2000:]}"
            )
    return [json.loads(results.splitlines()[-1]) for results, _ in said]


def one_rank(rank: int, asked: dict[str, Any]) -> dict[str, float]:
    """Build, in this process: seconds, and MiB above what importing took."""
    import logging
    import resource

    import torch.distributed

    logging.disable(logging.WARNING)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked["cores"]])
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{asked['meeting']}/store", rank=rank, world_size=asked["ranks"]
    )
    builder = _builder(asked)
    # Last of all: some virtual machines give page cache back to their host within seconds.
    for path in sorted(Path(asked["folder"]).glob("*.idx"))[rank :: asked["ranks"]]:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 20):
                pass
    torch.distributed.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    built = builder.build()
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return {"seconds": seconds, "peak": peak / 1024, "samples": float(len(built[0]))}


def _builder(asked: dict[str, Any]) -> Any:
    prefixes = [str(path.with_suffix("")) for path in sorted(Path(asked["folder"]).glob("*.bin"))][:: asked["every"]]
    sizes = [float(Path(f"{prefix}.bin").stat().st_size) for prefix in prefixes]
    samples = asked["train_samples"]
    options = {
        "random_seed": 1234,
        "sequence_length": SEQUENCE_LENGTH,
        "blend": (prefixes, sizes),
        "split": "98,1,1",
        "path_to_cache": asked["cache"],
        "num_dataset_builder_threads": asked["threads"],
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    wanted = [samples, samples // 100, samples // 100]
    if asked["library"] == "trackbed":
        from trackbed.builder import BlendedMegatronDatasetBuilder
        from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer

        config = GPTDatasetConfig(tokenizer=NullTokenizer(50_000), **options)
        return BlendedMegatronDatasetBuilder(GPTDataset, wanted, lambda: True, config)
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset

    from benchmarks.against_megatron import theirs_tokenizer

    config = gpt_dataset.GPTDatasetConfig(tokenizer=theirs_tokenizer(), **options)
    return blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, wanted, lambda: True, config
    )


def floor_seconds(cache: Path, folder: Path) -> float:
    """Seconds to write as many fresh files of the same sizes as a cache has, manifests included, and to rename them."""
    sizes = [path.stat().st_size for path in cache.rglob("*") if path.is_file()]
    (folder / "partial").mkdir(parents=True)
    content = bytes(max(sizes))
    os.sync()
    started = time.perf_counter()
    for number, size in enumerate(sizes):
        path = f"{folder}/partial/{number}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        view = memoryview(content)[:size]
        while view:
            view = view[os.write(descriptor, view) :]
        os.close(descriptor)
        os.rename(path, f"{folder}/{number}")  # noqa: PTH104  pathlib would be measured too
    return time.perf_counter() - started


def table(rows: Sequence[Times]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| | Trackbed, s | megatron-core, s | times faster | of the floor | MiB | megatron-core, MiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        for name, times in (("cold", row.cold), ("warm", row.warm)):
            ours, theirs = times["trackbed"], times["megatron"]
            lines.append(
                f"| {row.start.what}, {name} | {ours:.2f} | {theirs:.2f} | {theirs / ours:.1f} | "
                + (f"{ours / row.floor:.1f} of {row.floor:.2f} s" if name == "cold" else "")
                + (f" | {row.peak['trackbed']:.0f} | {row.peak['megatron']:.0f} |" if name == "cold" else " | | |")
            )
    return "\n".join(lines)


def rows(scratch: Path, *, full: bool, only: str = "") -> Iterator[Times]:
    """What was measured of each start whose name holds `only`."""
    for number, start in enumerate(_starts(scratch, full=full)):
        if only in start.what:
            if not start.folder.exists():
                make_pairs(start.folder, _documents(start.folder.name))
            caches = scratch / f"caches{number}"
            caches.mkdir()
            yield measure(start, caches)


def _starts(scratch: Path, *, full: bool) -> list[Start]:
    """The starts that are measured."""
    small, few = scratch / "small", "1,000 datasets of 1,000 documents"
    found = [
        Start(f"{few}, 1 rank of 1 thread", small, 120_000, rounds=5),
        Start(f"{few}, 1 rank of 2 threads", small, 120_000, threads=2, rounds=5),
    ]
    if full:
        large, many = scratch / "large", "1,000 datasets of 2e8 documents in all"
        some = "200 datasets of 4e7 documents in all"
        found += [
            Start(f"{many}, 1 rank of 2 threads", large, 28_000_000, threads=2),
            Start(f"{many}, 2 ranks of 1 thread", large, 28_000_000, ranks=2),
            Start(f"{some}, 1 rank of 1 thread, on one core", large, 5_600_000, every=5, cores=1),
            Start(f"{some}, 1 rank of 2 threads", large, 5_600_000, every=5, threads=2),
        ]
    return found


def _documents(folder: str) -> npt.NDArray[np.int64]:
    """`[NUM_DATASETS]` documents of each pair."""
    return np.full(NUM_DATASETS, 1_000, dtype=np.int64) if folder == "small" else spread(1e4, 1e7, 2e8)


def main() -> int:
    """Measure and print; or be one rank of a start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="1,000 datasets of 2e8 documents too, and 200 of them")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure the starts whose name holds this")
    parser.add_argument("--folder", type=Path, help="where the files go: 12 GB; by default the system's")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("asked", nargs="?", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(one_rank(given.rank, json.loads(given.asked))))
        return 0
    with tempfile.TemporaryDirectory(prefix="trackbed-starts-", dir=given.folder) as scratch:
        found = []
        for row in rows(Path(scratch), full=given.full, only=given.only):
            print(f"{row.start.what}: cold {row.cold}, warm {row.warm}", file=sys.stderr)
            found.append(row)
    if not found:
        parser.error(f"--only must be in the name of a start, found {given.only!r}; most need --full")
    print(f"{LEGEND}\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
