"""Trackbed against megatron-core, over the same files in the same process."""

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron.core.datasets.blended_megatron_dataset_builder as mc_builder
import megatron.core.datasets.gpt_dataset as mc_gpt
import megatron.core.datasets.indexed_dataset as mc_indexed
import numpy as np
import torch
from megatron.core.tokenizers import MegatronTokenizer

from benchmarks.harness import Comparison, compare
from trackbed.builder import BlendedMegatronDatasetBuilder
from trackbed.datasets import GPTDataset, GPTDatasetConfig, NullTokenizer
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder

VOCAB = 50_000
Class = Any


def sparse_pair(prefix: Path, lengths: np.ndarray) -> str:
    """A pair with a real index and a `.bin` of zeros that takes no room on the disk."""
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1].astype(np.int64) * 2, out=pointers[1:])
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\0\0" + np.uint64(1).tobytes() + np.uint8(8).tobytes())
        file.write(np.array([len(lengths), len(lengths) + 1], dtype=np.uint64).tobytes())
        for part in (lengths.astype(np.int32), pointers, np.arange(len(lengths) + 1)):
            part.tofile(file)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * 2)
    return str(prefix)


def open_large(folder: Path) -> Comparison:
    """Opening a file of 20 million documents."""
    prefix = sparse_pair(folder / "large", np.random.default_rng(0).integers(100, 1000, 20_000_000, dtype=np.int32))
    return compare(
        "open a file of 20 million documents",
        lambda: [IndexedDataset(prefix) for _ in range(20)],
        lambda: [mc_indexed.IndexedDataset(prefix) for _ in range(20)],
        items=20,
        rounds=15,
    )


def write_documents(folder: Path) -> list[Comparison]:
    """Documents of 600 tokens, as arrays of the file's type, wider arrays, tensors and lists."""
    rng = np.random.default_rng(0)
    wide = [rng.integers(0, VOCAB, 600) for _ in range(2000)]
    kinds = {
        "uint16 arrays": [document.astype(np.uint16) for document in wide],
        "int64 arrays": wide,
        "int64 tensors": [torch.from_numpy(document) for document in wide],
        "lists": [document.tolist() for document in wide],
    }

    def write(cls: Class, prefix: str, documents: list[Any]) -> None:
        builder = cls(f"{prefix}.bin", np.uint16)
        for document in itertools.chain.from_iterable(itertools.repeat(documents, 10)):
            builder.add_document(document, [600])
        builder.finalize(f"{prefix}.idx")

    return [
        compare(
            f"write documents of 600 tokens, {kind}, to finalize",
            lambda documents=documents: write(IndexedDatasetBuilder, str(folder / "ours"), documents),
            lambda documents=documents: write(mc_indexed.IndexedDatasetBuilder, str(folder / "theirs"), documents),
            items=20_000,
            rounds=21,
        )
        for kind, documents in kinds.items()
    ]


def options(cache: Path, **more: Any) -> dict[str, Any]:
    """Fields that both configurations take."""
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    return {"random_seed": 1234, "path_to_cache": str(cache), **flags, **more}


def theirs_tokenizer() -> Any:
    """Megatron Core's null tokenizer."""
    return MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=VOCAB)


def read_samples(folder: Path) -> list[Comparison]:
    """Random samples of 4,096 tokens, about 7 documents each, from the page cache."""
    rng = np.random.default_rng(0)
    builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), np.uint16)
    for length in rng.integers(100, 1100, 200_000):
        builder.add_document(rng.integers(0, VOCAB, length, dtype=np.uint16), [length])
    builder.finalize(str(folder / "corpus.idx"))
    found = []
    for name, masked in (("no attention mask", False), ("attention mask", True)):
        more = {
            "sequence_length": 4096,
            "blend": ([str(folder / "corpus")], None),
            "split": "1",
            "create_attention_mask": masked,
        }
        ours = GPTDatasetConfig(tokenizer=NullTokenizer(VOCAB), **options(folder / "cache", **more))
        theirs = mc_gpt.GPTDatasetConfig(tokenizer=theirs_tokenizer(), **options(folder / "cache-theirs", **more))
        mine = BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, ours).build()[0]
        other = mc_builder.BlendedMegatronDatasetBuilder(mc_gpt.GPTDataset, [None] * 3, lambda: True, theirs).build()[0]
        positions = rng.integers(0, len(mine), 3000).tolist()
        found.append(
            compare(
                f"GPTDataset[i], 4,096 tokens, {name}",
                lambda mine=mine, positions=positions: [mine[position] for position in positions],
                lambda other=other, positions=positions: [other[position] for position in positions],
                items=len(positions),
            )
        )
    return found


def build_blend(folder: Path) -> list[Comparison]:
    """200 datasets of 10,000 documents on average, blended, with three splits; cold, and from the cache."""
    rng = np.random.default_rng(0)
    prefixes = [
        sparse_pair(folder / f"part{number}", rng.integers(100, 1100, rng.integers(2_000, 18_000), dtype=np.int32))
        for number in range(200)
    ]
    more = {"sequence_length": 4096, "blend": (prefixes, rng.random(200).tolist()), "split": "98,1,1"}
    sizes = [300_000, 3_000, 3_000]
    serial = itertools.count()

    def ours(cache: Path) -> None:
        config = GPTDatasetConfig(tokenizer=NullTokenizer(VOCAB), **options(cache, **more))
        BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()

    def theirs(cache: Path) -> None:
        config = mc_gpt.GPTDatasetConfig(tokenizer=theirs_tokenizer(), **options(cache, **more))
        mc_builder.BlendedMegatronDatasetBuilder(mc_gpt.GPTDataset, sizes, lambda: True, config).build()

    def fresh() -> Path:
        return folder / f"cold{next(serial)}"

    cold = compare("build a blend of 200 datasets, cold", lambda: ours(fresh()), lambda: theirs(fresh()), rounds=9)
    warm = compare(
        "open a blend of 200 datasets from the cache",
        lambda: ours(folder / "cold0"),
        lambda: theirs(folder / "cold1"),
        rounds=5,
    )
    return [cold, warm]


def comparisons(folder: Path) -> Iterator[Comparison]:
    """All of them, one after the other."""
    yield open_large(folder / "open")
    yield from write_documents(folder / "write")
    yield from read_samples(folder / "read")
    yield from build_blend(folder / "build")


def run(folder: Path) -> Iterator[Comparison]:
    """All of them, in folders below `folder`, which are removed at the end."""
    for name in ("open", "write", "read", "build"):
        (folder / name).mkdir(parents=True)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    try:
        yield from comparisons(folder)
    finally:
        torch.distributed.destroy_process_group()
        shutil.rmtree(folder)
