"""`python -m benchmarks.masked`: samples of BERT and T5, and their index, against megatron-core, as Markdown tables.

512 tokens a sample, a vocabulary of 30,000, 3-grams, whole words: one thread, from the page cache, in one process, in
turns, so that a machine that slows down slows both.
"""

import logging
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import Comparison, compare, machine, table
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from trackbed.tokens import IndexedDatasetBuilder

LENGTH, DECODER_LENGTH, VOCABULARY = 512, 256, 30_000
NUM_SAMPLES, BATCH = 250, 50
MAPPING_SENTENCES: Final = 20_000_000
"""Sentences of 20 tokens that give about 8 million samples of BERT, without the special tokens, in 10 epochs."""
MODELS: Final[dict[str, tuple[Any, Any, dict[str, Any]]]] = {
    "BERT": (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, {"classification_head": True}),
    "T5": (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, {"sequence_length_decoder": DECODER_LENGTH}),
}
NEEDED: Final = {"dataset[i]": 15.0, "gather": 50.0}
"""Times megatron-core."""


class Tokenizer:
    """A WordPiece vocabulary in which every third token continues a word."""

    cls, sep, mask, bos, eos, eod, pad = range(VOCABULARY, VOCABULARY + 7)

    def __init__(self) -> None:
        self.additional_special_tokens_ids = list(range(VOCABULARY + 7, VOCABULARY + 207))
        self.vocab_size = VOCABULARY + 207
        self.inv_vocab = {token: f"##{token}" if token % 3 == 0 else f"{token}" for token in range(self.vocab_size)}
        self.unique_identifiers = OrderedDict([("class", "Tokenizer")])


def write_corpus(folder: Path) -> str:
    """20,000 sentences of 10 to 60 tokens, 40 a document."""
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(folder / "sentences.bin"), np.uint16)
    for _ in range(500):
        lengths = rng.integers(10, 60, 40).tolist()
        builder.add_document(rng.integers(0, VOCABULARY, sum(lengths), dtype=np.uint16), lengths)
    builder.finalize(str(folder / "sentences.idx"))
    return str(folder / "sentences")


def build(builder: Any, cls: Any, config: Any, prefix: str, cache: str, **options: Any) -> Any:
    """The training data of one library."""
    made = config(
        random_seed=1234,
        sequence_length=LENGTH,
        blend=([prefix], None),
        split="1",
        path_to_cache=f"{prefix}-{cache}",
        tokenizer=Tokenizer(),
        masking_probability=0.15,
        short_sequence_probability=0.1,
        masking_max_ngram=3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=False,
        **options,
    )
    return builder(cls, [2000, 0, 0], lambda: True, made).build()[0]


def open_megatron(model: str, prefix: str, **options: Any) -> Any:
    """Megatron Core's dataset over the same files."""
    from importlib import import_module

    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder as TheirBuilder

    name = f"{model}MaskedWordPieceDataset"
    module = import_module(f"megatron.core.datasets.{model.lower()}_dataset")
    return build(TheirBuilder, getattr(module, name), getattr(module, f"{name}Config"), prefix, "theirs", **options)


def comparisons(folder: Path) -> Iterator[Comparison]:
    """One sample at a time, and batches."""
    prefix = write_corpus(folder)
    for model, (cls, config, options) in MODELS.items():
        ours = build(BlendedMegatronDatasetBuilder, cls, config, prefix, "ours", **options)
        theirs = open_megatron(model, prefix, **options)
        positions = range(NUM_SAMPLES)

        def one_by_one(dataset: Any, positions: range = positions) -> None:
            for position in positions:
                dataset[position]

        def in_batches(dataset: Any = ours, positions: range = positions) -> None:
            for first in positions[::BATCH]:
                dataset.gather(range(first, first + BATCH), num_threads=1)

        for what, run in (("dataset[i]", lambda dataset=ours, run=one_by_one: run(dataset)), ("gather", in_batches)):
            peer = lambda dataset=theirs, run=one_by_one: run(dataset)  # noqa: E731
            yield compare(f"{model}, {what}", run, peer, items=NUM_SAMPLES, rounds=5)


def mapping() -> Iterator[Comparison]:
    """The index: nanoseconds a row."""
    from megatron.core.datasets import helpers

    from trackbed.megatron.functions import build_mapping

    lengths = np.full(MAPPING_SENTENCES // 10, 20, dtype=np.int32)
    borders = np.arange(0, len(lengths) + 1, 20, dtype=np.int64)
    for what, probability in (("with short samples", 0.1), ("without", 0.0)):
        arguments = (borders, lengths, 2**31 - 2, 8_000_000, 125, probability, 1234, False, 2)
        rows = len(build_mapping(*arguments))
        yield compare(
            f"build_mapping of {rows:,} rows, {what}",
            lambda arguments=arguments: build_mapping(*arguments),  # type: ignore[misc]
            lambda arguments=arguments: helpers.build_mapping(*arguments),  # type: ignore[misc]
            items=rows,
            rounds=3,
            moved_bytes=12,
        )


def main() -> int:
    """Measure everything; 1 if samples are made less than 15 times, or batches less than 50 times as fast."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    import torch.distributed

    rows = []
    with tempfile.TemporaryDirectory(prefix="trackbed-bench-") as folder:
        # Megatron Core's constructor asks for a rank.
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        for row in [*comparisons(Path(folder)), *mapping()]:
            print(f"{row.what}: {row.ratio:.1f} times", file=sys.stderr)
            rows.append(row)
    print(f"Medians of runs that alternate in one process, one thread, on {machine()}.\n\n{table(rows)}")
    short = [row for row in rows for name, needed in NEEDED.items() if name in row.what and row.ratio < needed]
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
