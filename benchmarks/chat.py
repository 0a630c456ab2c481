"""`python -m benchmarks.chat`: conversations to token files with masks, against rendering and plain tokenising alone.

JSON lines of conversations of 5.5 KB on average, of texts of this machine, the template `qwen3_training` of trl, and a
byte-level BPE that is trained first. The others have the messages in memory: they render all of them, with Trackbed's
template or with transformers without and with its marks, tokenise the texts in batches, and throw the ids away.
`preprocess` reads the lines, and writes a sealed pair with its mask. All on one core, in turn; medians, in MB of lines
a second.
"""

import argparse
import importlib.metadata
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import machine
from benchmarks.text import texts_of
from trackbed.preprocess import (
    ChatConfig,
    PreprocessConfig,
    TrainingConfig,
    open_fastest_tokenizer,
    open_tokenizer,
    preprocess,
    train_tokenizer,
)
from trackbed.preprocess.chat.template import Variables, open_template

TEMPLATE: Final = "qwen3_training"
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MEAN_BYTES, BATCH_CHARS, ROUNDS = 5_500, 1 << 20, 5
Messages = list[dict[str, str]]


def template_path() -> Path:
    """The file of the template in the installed package trl."""
    files = importlib.metadata.files("trl") or []
    return next(Path(str(file.locate())) for file in files if file.name == f"{TEMPLATE}.jinja")


def conversations(count: int) -> Iterator[Messages]:
    """Conversations of one to seven turns of questions and answers, the same on each call."""
    rng = np.random.default_rng(1)
    text = "".join(itertools.islice((one for one in texts_of("code") if one.isascii()), 4_000))
    for _ in range(count):
        sizes = rng.lognormal(0, 0.8, 2 * rng.integers(1, 8))
        sizes[1::2] *= 4  # answers are longer
        sizes = np.maximum(sizes / sizes.sum() * MEAN_BYTES * rng.gamma(2, 0.5), 8).astype(int)
        starts = rng.integers(0, len(text) - sizes)
        parts = [text[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
        yield [{"role": ("user", "assistant")[turn % 2], "content": part} for turn, part in enumerate(parts)]


def batches_of(texts: list[str]) -> Iterator[list[str]]:
    """The texts in batches of about a million characters."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if sum(map(len, batch)) >= BATCH_CHARS:
            yield batch
            batch = []
    yield batch


def ways(folder: Path, tokenizer: Any, talks: list[Messages], lines: Path) -> dict[str, Callable[[], None]]:
    """What is measured, by name."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = template_path().read_text(encoding="utf-8")
    template = open_template("", template_path(), date=None, tokens={"eos_token": SPECIAL[0]}, variables={})
    if template is None:
        raise RuntimeError(f"{TEMPLATE}: must be a template")
    flat = getattr(tokenizer, "tokenize_flat", tokenizer.tokenize_batch)
    numbers = itertools.count()

    def tokenise(texts: list[str]) -> None:
        for batch in batches_of(texts):
            flat(batch)

    def ours() -> None:
        chat = ChatConfig(template=template_path())
        output = str(folder / f"out{next(numbers)}")
        # Each run has another name of the file: one that was read before is not read again.
        preprocess(PreprocessConfig(inputs=(lines,), output=output, chat=chat, workers=1), tokenizer)

    def with_transformers(*, marks: bool) -> None:
        options: Any = {"chat_template": source, "return_assistant_tokens_mask": marks, "eos_token": SPECIAL[0]}
        tokenise(list(render_jinja_template(conversations=talks, **options)[0]))

    return {
        "`preprocess` from JSON lines to a sealed pair with its mask": ours,
        "Trackbed's template with marks, plain tokenising": lambda: tokenise(
            ["".join(template.render(talk, Variables())) for talk in talks]
        ),
        "transformers without marks, plain tokenising": lambda: with_transformers(marks=False),
        "transformers with marks, plain tokenising": lambda: with_transformers(marks=True),
    }


def measure(folder: Path, tokenizer: Any, count: int) -> list[str]:
    """Runs all ways in turn; returns the rows of the table."""
    talks = list(conversations(count))
    lines = folder / f"talks-{count}.jsonl"
    with lines.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": talk}) + "\n" for talk in talks)
    found = ways(folder, tokenizer, talks, lines)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for number in range(ROUNDS + 1):
        for name in list(found)[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            found[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
    medians = [statistics.median(one) for one in seconds.values()]
    megabytes = lines.stat().st_size / 1e6
    return [
        f"| {name} | {megabytes / median:,.1f} | {1e6 * median / count:,.0f} us | {median / medians[0]:.2f} |"
        for name, median in zip(seconds, medians, strict=True)
    ]


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=12_000, help="number of conversations")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    with tempfile.TemporaryDirectory(prefix="trackbed-chat-") as scratch:
        folder = Path(scratch)
        corpus = folder / "corpus.txt"
        corpus.write_text("\n".join(one["content"] for talk in conversations(1_000) for one in talk), encoding="utf-8")
        path = folder / "tokenizer.json"
        train_tokenizer(TrainingConfig(inputs=(corpus,), vocab_size=16_384, special_tokens=SPECIAL), path)
        print(f"{machine()}, on one core\n")
        for engine, opener, count in (
            ("fastokens", open_fastest_tokenizer, given.count),
            ("tokenizers", open_tokenizer, given.count // 10),
        ):
            print(f"| {engine}, {count:,} conversations | MB/s | a conversation | `preprocess` has of its speed |")
            print("|---|---:|---:|---:|")
            print("\n".join(measure(folder, opener(str(path), special_tokens=True), count)) + "\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
