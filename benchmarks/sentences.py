"""`python -m benchmarks.sentences`: splitting of sentences, alone and in `preprocess`, on one core and on two.

The splitter alone has its texts in memory, and throws the sentences away. `preprocess` reads JSON lines and writes a
sealed pair of bytes, from its call on. Each figure is the median of runs that alternate. Texts are the docstrings of
the Python library and of all that is installed, those of a file in one document.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.harness import machine
from benchmarks.text import end_to_end, texts_of, write_lines
from trackbed.preprocess import BYTES, SentenceSplitter, open_splitter, open_tokenizer

_DOCSTRING: Final = re.compile(r'"""(.+?)"""', re.DOTALL)


def docstrings() -> Iterator[str]:
    """English texts of this machine, the same on each call."""
    for text in texts_of("code"):
        if found := "\n\n".join(_DOCSTRING.findall(text)):
            yield found


def measure(splitter: SentenceSplitter, lines: Path, folder: Path, *, copies: int, rounds: int) -> dict[str, float]:
    """MB/s of text: the splitter alone on one core, and `preprocess` on one and on two."""
    megabytes = sum(len(json.loads(line)["text"].encode()) for line in lines.read_bytes().splitlines()) / 1e6
    options = {"splitter": splitter, "megabytes": megabytes}
    ways: dict[str, Callable[[], float]] = {
        "alone": lambda: _alone(splitter, lines, megabytes),
        "one": lambda: end_to_end(open_tokenizer(BYTES), lines, folder, workers=1, copies=copies, **options),
        "two": lambda: end_to_end(open_tokenizer(BYTES), lines, folder, workers=2, copies=2 * copies, **options),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            found[name].append(ways[name]())
    return {name: statistics.median(rates) for name, rates in found.items()}


def _alone(splitter: SentenceSplitter, lines: Path, megabytes: float) -> float:
    texts = [json.loads(line)["text"] for line in lines.read_bytes().splitlines()]
    started = time.perf_counter()
    for text in texts:
        splitter.split(text)
    return megabytes / (time.perf_counter() - started)


def table(rows: dict[str, dict[str, float]]) -> str:
    """The figures as a Markdown table."""
    lines = [
        "| splitter | alone, one core, MB/s | `preprocess`, one core, MB/s | two cores, MB/s | two, of one |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        two, one = row["two"], row["one"]
        lines.append(f"| {name} | {row['alone']:.1f} | {one:.1f} | {two:.1f} | {two / one:.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; 1 if two cores are less than 1.7 times as fast as one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go; by default the system's")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--megabytes", type=int, default=16, help="text in the file that is read several times")
    parser.add_argument("--punkt", help="folder of a Punkt model, to measure it too")
    given = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory(prefix="trackbed-sentences-", dir=given.folder) as name:
        lines = Path(name) / "lines.jsonl"
        write_lines(lines, docstrings(), given.megabytes * 1_000_000)
        names = {"sentencex": 8, **({f"punkt:{given.punkt}": 1} if given.punkt else {})}
        for splitter, copies in names.items():
            opened = open_splitter(splitter)
            rows[splitter.partition(":")[0]] = measure(opened, lines, Path(name), copies=copies, rounds=given.rounds)
    print(f"Medians of runs that alternate, tokenizer `bytes`, on {machine()}.\n\n{table(rows)}")
    return int(len(os.sched_getaffinity(0)) > 1 and any(row["two"] < 1.7 * row["one"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
