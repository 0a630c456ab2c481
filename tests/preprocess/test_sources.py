"""The source of each document is the line or row that has its text."""

import gzip
import json
import random
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.support.tiers import slow_but
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.preprocess import PreprocessConfig, preprocess
from trackbed.preprocess.worker_pool import map_in_order
from trackbed.tokens import IndexedDataset, merge, verify_content
from trackbed.tokens.document_sources import DocumentSources
from trackbed.tokens.shard_list import read_all_shards

UNPACK = {".jsonl": bytes, ".gz": gzip.decompress, ".zst": lambda raw: zstandard.decompress(raw, 1 << 24)}
PACK = {".jsonl": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def records(count, seed):
    """Lines of JSON with a text of any length, blank lines, texts without tokens, and keys before the text."""
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        text = "" if draw.random() < 0.05 else f"{seed}/{number} " + "äß🚂x"[draw.randrange(4)] * draw.randrange(120)
        lines.append(json.dumps({"id": number, "text": text}, ensure_ascii=draw.random() < 0.5))
        lines += [""] * (draw.random() < 0.03)
        if draw.random() < 0.02:
            lines.append(json.dumps({"id": number, "text": "y" * 900}))  # beyond the limit
    return lines


def write_inputs(folder, count):
    """Files of every kind, of which each has some bad records."""
    for seed, name in enumerate(["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.jsonl"]):
        end = Path(name).suffix
        (folder / name).write_bytes(PACK[end]("\n".join(records(count, seed)).encode() + b"\n" * (seed % 2)))
    texts = [json.loads(line)["text"] for line in records(count, 9) if line]
    pq.write_table(pa.table({"text": texts}), folder / "e.parquet", row_group_size=37)
    (folder / "f.txt").write_text("a whole text")
    return [folder / name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.jsonl", "e.parquet", "f.txt")]


@cache
def content_of(name):
    path = Path(name)
    if path.suffix == ".parquet":
        return pq.read_table(path)["text"].to_pylist()
    return UNPACK.get(path.suffix, bytes)(path.read_bytes())


def text_at(source):
    """The text of the record that begins at a place of an input."""
    content = content_of(source.name)
    if source.unit == "row":
        return content[source.place]
    if source.name.endswith(".txt"):
        return content.decode()
    line = content[source.place : content.find(b"\n", source.place) % (len(content) + 1)]
    return json.loads(line)["text"]


def check(prefix, count=None):
    """Checks the sources of random documents, or of all; returns the number of documents."""
    verify_content(str(prefix))
    documents, sources = IndexedDataset(str(prefix)), DocumentSources.open(str(prefix))
    assert len(sources) == len(documents)
    chosen = range(len(documents)) if count is None else random.Random(1).choices(range(len(documents)), k=count)
    for document in chosen:
        assert text_at(sources.of(document)) == ByteTokenizer().detokenize(documents[document])
    return len(documents)


def run(inputs, output, **options):
    options = {"workers": 1, "chunk_bytes": 2000, "max_record_bytes": 800, "skip_bad": True, **options}
    config = PreprocessConfig(inputs=tuple(inputs), output=str(output), keep_sources=True, **options)
    return preprocess(config, ByteTokenizer())


@pytest.mark.parametrize(("count", "workers"), slow_but([(60, 1)], [(60, 1), (600, 3)]))
def test_sources_are_the_input_lines(tmp_path, count, workers):
    inputs = write_inputs(tmp_path, count)
    run(inputs, tmp_path / "out", workers=workers)
    num_documents = check(tmp_path / "out_text_document", None if count < 100 else 1000)
    assert num_documents > 4 * count


def test_merged_pairs_and_shards_keep_them(tmp_path):
    inputs = write_inputs(tmp_path, 60)
    run(inputs, tmp_path / "out", shard_bytes=3000)
    shards = read_all_shards(tmp_path / "out.toml")
    assert len(shards) > 3
    total = sum(check(shard) for shard in shards)
    merge(shards, str(tmp_path / "all"))
    assert check(tmp_path / "all") == total
    again = run(inputs, tmp_path / "out", shard_bytes=3000)
    assert again.outputs[0].documents == total
    Path(f"{shards[0]}.src").unlink()
    run(inputs, tmp_path / "out", shard_bytes=3000)
    check(shards[0])


def test_a_resumed_run_goes_on_with_them(tmp_path, monkeypatch):
    inputs = write_inputs(tmp_path, 60)
    run(inputs, tmp_path / "whole")

    def stops(work, jobs, **options):
        for number, result in enumerate(map_in_order(work, jobs, **options)):
            if number == 9:
                raise KeyboardInterrupt
            yield result

    with monkeypatch.context() as patch:
        patch.setattr("trackbed.preprocess.pipeline.map_in_order", stops)
        with pytest.raises(KeyboardInterrupt):
            run(inputs, tmp_path / "out", save_interval_bytes=3000)
    assert {"0.bin", "0.files", "0.places"} <= {path.name for path in (tmp_path / "out.unfinished").iterdir()}
    run(inputs, tmp_path / "out", save_interval_bytes=3000)
    check(tmp_path / "out_text_document")
    assert (tmp_path / "out_text_document.src").read_bytes() == (tmp_path / "whole_text_document.src").read_bytes()


@pytest.mark.parametrize("drop_record", [True, False])
def test_each_key_has_its_own(tmp_path, drop_record):
    texts = [("a", "b"), ("", "c"), ("d", ""), ("e", "f")]
    lines = [json.dumps({"one": one, "two": two}) for one, two in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    run([tmp_path / "a.jsonl"], tmp_path / "out", json_keys=("one", "two"), drop_record=drop_record)
    kept = [number for number, pair in enumerate(texts) if all(pair) or not drop_record]
    starts = [len("\n".join([*lines[:number], ""])) for number in kept]
    for key in ("one", "two"):
        sources = DocumentSources.open(str(tmp_path / f"out_{key}_document"))
        assert [sources.of(document).place for document in range(len(sources))] == starts


def test_without_the_option_there_are_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    config = PreprocessConfig(inputs=(tmp_path / "a.jsonl",), output=str(tmp_path / "out"), workers=1)
    preprocess(config, ByteTokenizer())
    assert DocumentSources.open(str(tmp_path / "out_text_document")) is None
    assert not (tmp_path / "out_text_document.src").exists()
