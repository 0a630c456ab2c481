"""Pairs of texts and images against those that Megatron Core's builder writes for the same records."""

import json
import random

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.preprocess import ImagesConfig, PreprocessConfig, preprocess

EOD = ByteTokenizer().eod


def write_theirs(records, folder, prefix, *, pad_length, append_eod):
    """Calls the builder as Megatron's tool for images does."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32, multimodal=True)
    for record in records:
        tokens = list(record["text"].encode())
        if tokens and append_eod:
            tokens = (tokens + [EOD] * pad_length)[:pad_length]
        raw = (folder / record["image"]).read_bytes()
        padding = 3 - (len(raw) + 3) % 4
        image = np.frombuffer(np.int32(padding).tobytes() + raw + bytes(padding), dtype=np.int32).copy()
        builder.add_item(torch.IntTensor(tokens))
        builder.add_item(torch.from_numpy(image), 1)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("append_eod", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_pair_has_the_bytes_of_megatrons_and_is_read_by_it(tmp_path, seed, append_eod):
    draw = random.Random(seed)
    (tmp_path / "images").mkdir()
    records = []
    for number in range(40):
        (tmp_path / "images" / f"{number}.png").write_bytes(
            draw.randbytes(draw.choice([0, 1, 2, 3, 4, 5, 1000, 70_001]))
        )
        text = "" if draw.random() < 0.1 else "".join(draw.choices("ab \u00e9\u6771\U0001f642", k=draw.randrange(30)))
        records.append({"text": text, "image": f"{draw.randrange(number + 1)}.png"})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_theirs(records, tmp_path / "images", tmp_path / "theirs", pad_length=16, append_eod=append_eod)
    config = PreprocessConfig(
        inputs=(tmp_path / "a.jsonl",),
        output=str(tmp_path / "ours"),
        append_eod=append_eod,
        workers=2,
        chunk_bytes=700,
        images=ImagesConfig(folder=tmp_path / "images", pad_length=16),
    )
    preprocess(config, ByteTokenizer())
    for end in ("bin", "idx"):
        assert (tmp_path / f"ours.{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()
    dataset = IndexedDataset(str(tmp_path / "ours"), multimodal=True)
    assert len(dataset) == 80
    for number, record in enumerate(records):
        image, mode = dataset[2 * number + 1]
        raw = (tmp_path / "images" / record["image"]).read_bytes()
        assert (int(mode), image[1:].tobytes()[: len(raw)]) == (1, raw)
