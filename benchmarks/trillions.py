"""`python -m benchmarks.trillions`: a start over 5e12 tokens in 1e9 documents of 1,000 files, in the house's orders.

From an empty cache and a dropped page cache to the first batch. Takes 55 GB of disk and some minutes; the `.bin` files
are sparse, the `.idx` files real.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import machine

NUM_DATASETS: Final = 1_000
TOKENS_PER_DOCUMENT: Final = 5_000
SEQUENCE_LENGTH: Final = 4_096
BATCH: Final = 8
QUOTED: Final = "| the article, 5e12 tokens, on a cluster (quoted) | 490 | | |"
_BYTES_PER_DOCUMENT: Final = 20 + 31.5 + 1.5
_DROP: Final = Path("/proc/sys/vm/drop_caches")


def make_pairs(folder: Path, documents: int) -> None:
    """`NUM_DATASETS` pairs of so many documents, of 1 to 9,999 tokens, whose `.bin` files take no room."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * TOKENS_PER_DOCUMENT, documents, dtype="<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype="<i8") * 2])
    header = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x08"
    counts = np.array([documents, documents + 1], "<u8")
    for number in range(NUM_DATASETS):
        # Every file a different one, as its documents come in another order.
        shift = number * (documents // NUM_DATASETS)
        turned = np.roll(lengths, shift)
        np.cumsum(turned[:-1] * np.int64(2), out=pointers[1:])
        with (folder / f"pair{number:04d}.idx").open("wb") as file:
            file.write(header + counts.tobytes())
            for array in (turned, pointers, np.arange(documents + 1, dtype="<i8")):
                array.tofile(file)
        with (folder / f"pair{number:04d}.bin").open("wb") as file:
            file.truncate(int(pointers[-1]) + 2 * int(turned[-1]))


def start(folder: Path, order: str) -> dict[str, Any]:
    """From `build()` to the first batch, in this process."""
    from trackbed.builder import BlendedMegatronDatasetBuilder
    from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
    from trackbed.kernels import available_threads

    prefixes = [str(path.with_suffix("")) for path in sorted(folder.glob("*.bin"))]
    sizes = [float(Path(f"{prefix}.bin").stat().st_size) for prefix in prefixes]
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE_LENGTH,
        blend=(prefixes, sizes),
        split="1",
        path_to_cache=str(folder / "cache"),
        tokenizer=NullTokenizer(50_000),
        order=order,
        num_dataset_builder_threads=available_threads(),
        mid_level_dataset_surplus=0.0001,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    wanted = int(sum(sizes) / 2 / SEQUENCE_LENGTH * 0.99)
    with _PeakAnonymous() as peak:
        started = time.perf_counter()
        train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, [wanted, 0, 0], lambda: True, config).build()
        built = time.perf_counter() - started
        batch = [train[position]["tokens"] for position in range(BATCH)]
        seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "built": built,
        "anonymous_gib": peak.gib,
        "samples": len(train),
        "batch": [len(batch), len(batch[0])],
    }


class _PeakAnonymous:
    """The most anonymous memory that this process has while the block runs, looked at every 20 ms."""

    def __init__(self) -> None:
        self.gib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_PeakAnonymous":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            status = Path("/proc/self/status").read_text()
            self.gib = max(self.gib, int(status.partition("RssAnon:")[2].split()[0]) / 2**20)


def run_apart(folder: Path, order: str) -> dict[str, Any]:
    """One start in a fresh process, after the page cache was dropped where that is allowed."""
    subprocess.run(["sync"], check=True)
    dropped = True
    try:
        _DROP.write_text("3")
    except OSError:
        dropped = False
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.trillions", "--only", order, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return {**json.loads(done.stdout.splitlines()[-1]), "dropped": dropped}


def run(folder: Path, documents: int = 1_000_000) -> dict[str, dict[str, Any]]:
    """All rows.

    Args:
        folder: an empty one.
        documents: in each file.

    Raises:
        SystemExit: there is too little room.
    """
    needed = _BYTES_PER_DOCUMENT * documents * NUM_DATASETS + 1e9
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SystemExit(f"{folder}: must have {needed / 1e9:.0f} GB free, found {free / 1e9:.0f}")
    make_pairs(folder, documents)
    rows = {}
    for name, order in (
        ('Trackbed, `order="instant"`', "instant"),
        ('Trackbed, `order="megatron"`, empty cache', "megatron"),
        ('Trackbed, `order="megatron"`, again with the cache', "megatron"),
    ):
        rows[name] = run_apart(folder, order)
        print(f"{name}: {rows[name]}", file=sys.stderr)
    written = sum(path.stat().st_size for path in (folder / "cache").rglob("*") if path.is_file())
    print(f"{written / 1e9:.1f} GB of indices", file=sys.stderr)
    return rows


def table(rows: dict[str, dict[str, Any]], documents: int = 1_000_000) -> str:
    """The rows in Markdown."""
    total = documents * NUM_DATASETS
    dropped = all(row["dropped"] for row in rows.values())
    lines = [
        f"# A start over {total * TOKENS_PER_DOCUMENT:.0e} tokens",
        "",
        f"Written by `make bench-full`: {total:.0e} documents in {NUM_DATASETS:,} files, samples of "
        f"{SEQUENCE_LENGTH:,} tokens, 99 % of an epoch,",
        f"from `build()` to the first batch, page cache {'dropped' if dropped else 'as it was'}, on {machine()}.",
        "",
        "| | seconds | of them building | peak anonymous GiB |",
        "|---|---:|---:|---:|",
    ]
    for name, row in rows.items():
        lines.append(f"| {name} | {row['seconds']:.3g} | {row['built']:.3g} | {row['anonymous_gib']:.1f} |")
    return "\n".join([*lines, QUOTED, ""])


def main() -> int:
    """Measure and print; or be one start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000, help="in each file")
    parser.add_argument("--folder", help="where the files go; by default the system's")
    parser.add_argument("--only", nargs=2, metavar=("ORDER", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(start(Path(given.only[1]), given.only[0])))
        return 0
    with tempfile.TemporaryDirectory(prefix="trackbed-trillions-", dir=given.folder) as folder:
        print(table(run(Path(folder), given.documents), given.documents))
    return 0


if __name__ == "__main__":
    sys.exit(main())
