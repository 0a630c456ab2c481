"""Small pairs and configurations that tests of datasets share."""

from pathlib import Path

import numpy as np

from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.tokens import IndexedDatasetBuilder

VOCAB = 100
EOD = VOCAB


def write_pair(prefix: Path, lengths, *, seed=0, dtype=np.uint16) -> str:
    """A pair whose documents have these lengths: random tokens, then the end-of-document token."""
    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for length in lengths:
        tokens = rng.integers(0, VOCAB, length)
        tokens[-1:] = EOD
        builder.add_document(tokens, [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_pairs(folder: Path, num_pairs=3) -> list[str]:
    """Pairs of 30, 60, 90 ... documents."""
    rng = np.random.default_rng(1)
    return [
        write_pair(folder / f"pair{number}", rng.integers(0, 40, 30 * (number + 1)), seed=number)
        for number in range(num_pairs)
    ]


def gpt_config(cache: Path | None, **options) -> GPTDatasetConfig:
    """A configuration of samples of 16 tokens; `options` replace what they name."""
    defaults = {
        "random_seed": 7,
        "sequence_length": 16,
        "path_to_cache": None if cache is None else str(cache),
        "tokenizer": NullTokenizer(VOCAB),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    return GPTDatasetConfig(**{**defaults, **options})


def build(config, sizes=(50, 5, 5), cls=GPTDataset):
    """The datasets of all three splits."""
    return BlendedMegatronDatasetBuilder(cls, list(sizes), lambda: True, config).build()


def tokens_of(dataset, positions) -> list[list[int]]:
    """The tokens of some samples."""
    return [dataset[position]["tokens"].tolist() for position in positions]
