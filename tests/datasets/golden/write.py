"""Writes pairs, caches and positions with the Trackbed that is on the path: see PROVENANCE.md.

Runs in an empty folder, whose relative paths become a part of the names of indices. Imports nothing of the tests, and
from Trackbed only names that a67b0ce and later versions have.
"""

import json
import sys
from pathlib import Path

import numpy as np

from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.cache import await_flush
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.loading import MegatronPretrainingRandomSampler, MegatronPretrainingSampler
from trackbed.tokens import IndexedDatasetBuilder

ORDERS = ("megatron", "balanced", "instant")
BLENDS = {"one": (["pair0"], None), "blend": (["pair0", "pair1"], [0.5, 0.5])}
SIZES = [40, None, None]


def write_pair(prefix, seed):
    """Writes a pair of five documents."""
    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    for length in (20, 30, 40, 7, 60):
        builder.add_document(np.append(rng.integers(0, 100, length - 1), 100), [length])
    builder.finalize(f"{prefix}.idx")


def config_of(order, name, **options):
    """Returns the configuration of a dataset in a cache of the working directory."""
    defaults = {
        "random_seed": 7,
        "sequence_length": 16,
        "blend": BLENDS[name],
        "split": "1",
        "order": order,
        "path_to_cache": None if order == "instant" else "cache",
        "tokenizer": NullTokenizer(100),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": True,
        "create_attention_mask": False,
    }
    return GPTDatasetConfig(**{**defaults, **options})


def dataset_of(order, name, **options):
    """Returns the training dataset."""
    config = config_of(order, name, **options)
    return BlendedMegatronDatasetBuilder(GPTDataset, SIZES, lambda: True, config).build()[0]


def samplers_of(dataset, consumed=0):
    """Returns samplers of both kinds."""
    size, fingerprint = len(dataset), dataset.fingerprint
    return {
        "sequential": MegatronPretrainingSampler(size, consumed, 2, 0, 1, fingerprint=fingerprint),
        "random": MegatronPretrainingRandomSampler(dataset, size, consumed, 2, 0, 1, data_sharding=False),
    }


def main():
    """Writes everything into the working directory."""
    for number in range(2):
        write_pair(f"pair{number}", number)
    saved = {}
    for order in ORDERS:
        for name in BLENDS:
            dataset = dataset_of(order, name)
            states = {kind: one.state_dict() for kind, one in samplers_of(dataset, 6).items()}
            tokens = [dataset[position]["tokens"].tolist() for position in (6, 7)]
            saved[f"{order} {name}"] = {"states": states, "tokens": tokens}
    await_flush()
    Path("positions.json").write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
