"""`python -m benchmarks.writing`: many documents in one call, against one call each, megatron-core, and the disk.

Each figure is the median of runs that alternate in one process. Every run ends with the files under their final names:
Trackbed's are checksummed and flushed to the disk then, megatron-core's are neither. The disk is measured by writing
as many bytes from memory to a fresh file, which is flushed too.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.harness import machine
from trackbed.tokens import IndexedDatasetBuilder

BULK_BYTES: Final = 256 << 20
SINGLE_DOCUMENTS: Final = 100_000
BLOCK_BYTES: Final = 8 << 20
DOCUMENT_TOKENS: Final = (30, 100, 600)


@dataclass(frozen=True, slots=True)
class Rates:
    """Documents a second, for documents of one length, in uint16."""

    tokens: int
    bulk: float
    single: float
    megatron: float
    disk: float
    """Documents a second that the disk would take, tokens and index."""


def measure(folder: Path, *, tokens: int, rounds: int) -> Rates:
    """Write documents of `tokens` tokens in all four ways, in turn."""
    count = BULK_BYTES // (2 * tokens + 20)
    stream = np.random.default_rng(0).integers(0, 50_000, count * tokens, dtype=np.uint16)
    lengths = np.full(count, tokens, dtype=np.int64)
    few = stream[: min(count, SINGLE_DOCUMENTS) * tokens].reshape(-1, tokens)
    ways: dict[str, tuple[Callable[[], None], int]] = {
        "bulk": (lambda: write_bulk(folder / "bulk", stream, lengths), count),
        "single": (lambda: write_each(_builder(folder / "single"), folder / "single", few), len(few)),
        "megatron": (lambda: write_each(_theirs(folder / "megatron"), folder / "megatron", few), len(few)),
        "disk": (lambda: write_plain(folder / "disk", stream, 20 * count), count),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)  # who comes after a large file pays for its pages, too
        for name in order:
            started = time.perf_counter()
            ways[name][0]()
            if number > 0:
                seconds[name].append(time.perf_counter() - started)
    return Rates(tokens, **{name: ways[name][1] / statistics.median(taken) for name, taken in seconds.items()})


def write_bulk(prefix: Path, stream: npt.NDArray[np.uint16], lengths: npt.NDArray[np.int64]) -> None:
    """All documents in one call."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.add_documents(stream, lengths)
    builder.finalize(f"{prefix}.idx")


def write_each(builder: Any, prefix: Path, documents: npt.NDArray[np.uint16]) -> None:
    """One call for each document."""
    lengths = [documents.shape[1]]
    for document in documents:
        builder.add_document(document, lengths)
    builder.finalize(f"{prefix}.idx")


def write_plain(path: Path, stream: npt.NDArray[np.uint16], more_bytes: int) -> None:
    """The bytes of the stream, and as many more as an index would have, to a fresh file and to the disk."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    data = stream.view(np.uint8).data
    for start in range(0, len(data), BLOCK_BYTES):
        os.write(descriptor, data[start : start + BLOCK_BYTES])
    os.write(descriptor, data[:more_bytes])
    os.fsync(descriptor)
    os.close(descriptor)


def _builder(prefix: Path) -> IndexedDatasetBuilder:
    return IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)


def _theirs(prefix: Path) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder as Theirs

    return Theirs(f"{prefix}.bin", np.uint16)


def table(rows: Sequence[Rates]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| tokens a document | `add_documents`, 1/s | `add_document`, 1/s | times | megatron-core, 1/s | times | "
        "MB/s | the disk, MB/s | of it |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        megabytes = (2 * row.tokens + 20) / 1e6
        lines.append(
            f"| {row.tokens} | {row.bulk:,.0f} | {row.single:,.0f} | {row.bulk / row.single:.1f} | "
            f"{row.megatron:,.0f} | {row.bulk / row.megatron:.1f} | {row.bulk * megabytes:,.0f} | "
            f"{row.disk * megabytes:,.0f} | {row.bulk / row.disk:.0%} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go: 1 GB; by default the system's")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each that count")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = []
    with tempfile.TemporaryDirectory(prefix="trackbed-writing-", dir=given.folder) as folder:
        for tokens in DOCUMENT_TOKENS:
            rows.append(measure(Path(folder), tokens=tokens, rounds=given.rounds))
            print(rows[-1], file=sys.stderr)
    print(f"Medians of runs that alternate in one process, uint16, on {machine()}.\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
