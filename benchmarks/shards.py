"""`python -m benchmarks.shards`: shards made by Ray, by the local pool, and one pair without shards, on as many cores.

Each figure is MB of stored input a second from the first task to the last seal: the start of Ray and of the worker
processes is left out. Each is the median of runs that alternate. Texts are the Python files of this machine, repeated.
The memory of the driver is measured over many small shards.
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import copies_of, machine
from benchmarks.text import TEXT_BYTES, make_tokenizer, texts_of, write_lines
from trackbed.preprocess import PreprocessConfig, open_fastest_tokenizer, open_tokenizer, preprocess

WAYS: Final = ("one pair", "local", "ray")
SMALL_BYTES: Final = 4000


def rate(way: str, tokenizer: Any, lines: Path, folder: Path, *, copies: int, shards: int, workers: int) -> float:
    """MB/s of one way of writing a corpus, from the first file that a worker begins to the last seal."""
    for path in folder.iterdir():
        path.unlink()
    size_bytes = copies * lines.stat().st_size
    options: dict[str, Any] = {} if way == "one pair" else {"shard_bytes": -(-size_bytes // shards), "engine": way}
    config = PreprocessConfig(
        inputs=copies_of(lines, copies), output=str(folder / "out"), append_eod=True, workers=workers, **options
    )
    begins: list[float] = []
    watch = threading.Thread(target=_wait_for_file, args=(folder, begins))
    watch.start()
    preprocess(config, tokenizer)
    watch.join()
    last = max(path.stat().st_mtime for path in folder.glob("*.trackbed.json"))
    return size_bytes / 1e6 / (last - begins[0])


def _wait_for_file(folder: Path, begins: list[float]) -> None:
    while not any(folder.glob("out*_document.bin.*")):
        time.sleep(0.002)
    begins.append(time.time())


def driver_growth(lines: Path, folder: Path, *, shards: int) -> float:
    """KiB of resident memory by which this process grows for each shard of a run of small shards."""
    small = folder / "small.jsonl"
    small.write_bytes(lines.read_bytes()[: SMALL_BYTES * shards])
    options: dict[str, Any] = {"shard_bytes": SMALL_BYTES, "workers": 2, "skip_bad": True, "max_record_bytes": 50_000}
    tokenizer = open_tokenizer("bytes")
    few = PreprocessConfig(inputs=(small,), output=str(folder / "few"), **{**options, "shard_bytes": 10**6})
    preprocess(few, tokenizer)  # what the first run of a process loads
    before = _resident_kib()
    preprocess(PreprocessConfig(inputs=(small,), output=str(folder / "many"), **options), tokenizer)
    return (_resident_kib() - before) / shards


def _resident_kib() -> int:
    (found,) = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go: 4 GB; by default the system's")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--copies", type=int, default=40, help="how often the texts are repeated")
    parser.add_argument("--shards", type=int, default=32)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    workers = len(os.sched_getaffinity(0))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="trackbed-shards-", dir=given.folder) as name:
        folder = Path(name)
        lines = folder / "lines.jsonl"
        write_lines(lines, texts_of("code"), TEXT_BYTES)
        (folder / "out").mkdir()
        growth = driver_growth(lines, folder, shards=1000)
        path, what = make_tokenizer(folder, [lines])
        tokenizer = open_fastest_tokenizer(str(path))
        options = {"copies": given.copies, "shards": given.shards, "workers": workers}
        for number in range(given.rounds):
            for way in WAYS[:: -1 if number % 2 else 1]:
                found[way].append(rate(way, tokenizer, lines, folder / "out", **options))
                print(way, found[way][-1], file=sys.stderr)
    rates = {way: statistics.median(values) for way, values in found.items()}
    print(f"Medians of {given.rounds} runs that alternate, {given.shards} shards, with {what}, on {machine()}.\n")
    print("| | MB/s | of the local pool |\n|---|---:|---:|")
    for way in WAYS:
        print(f"| {way} | {rates[way]:.0f} | {rates[way] / rates['local']:.0%} |")
    print(f"\nThe driver grows by {growth:.2f} KiB for each shard.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
