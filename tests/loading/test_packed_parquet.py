"""Packed Parquet of Megatron-Bridge has the packs of our batches, and `preprocess` reads their documents from it.

Tests with Megatron-Bridge itself need a Python that has it without its dependencies: this one, or the one whose path is
in TRACKBED_BRIDGE_PYTHON.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets.test_packed import packed
from tests.support import chat
from tests.support.files.blends import EOD
from tests.support.tiers import slow_but
from trackbed import BatchLoader
from trackbed.errors import ArgumentError
from trackbed.kernels.reference import pieces_of_document
from trackbed.loading.packed_parquet import metadata_path, write_packed_parquet
from trackbed.preprocess import ChatConfig, PreprocessConfig, open_tokenizer, preprocess
from trackbed.tokens import IndexedDataset, IndexedDatasetBuilder
from trackbed.tokens.trained_tokens import TrainedColumns, TrainedTokens, runs_of

LENGTHS = [(512, 40), (512, 1000), (4096, 1000)]


def bridge_python():
    """Path of a Python that has Megatron-Bridge, or None."""
    stated = os.environ.get("TRACKBED_BRIDGE_PYTHON")
    if stated is not None:
        return stated
    spec = importlib.util.find_spec("megatron")
    places = [] if spec is None else spec.submodule_search_locations or []
    is_here = any((Path(place) / "bridge" / "data" / "packing" / "parquet.py").exists() for place in places)
    return sys.executable if is_here else None


needs_bridge = pytest.mark.skipif(
    bridge_python() is None,
    reason="needs megatron-bridge 0.6.2 for Python 3.12, here or at TRACKBED_BRIDGE_PYTHON",
)


def ask_bridge(folder, **request):
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    program = Path(__file__).parent / "bridge_reader.py"
    subprocess.run([bridge_python(), str(program), str(path)], check=True, capture_output=True)


def masked_pair(prefix, texts, masks):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", np.uint16)
    builder.trained = TrainedColumns()
    for text, mask in zip(texts, masks, strict=True):
        builder.add_document(text, [len(text)])
        runs = runs_of(mask)
        builder.trained.add(np.array([len(runs)]), runs, lengths=np.array([len(text)]), where="mask")
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def drawn(num_documents, *, mean, seed):
    """Documents that end in the only end token that they have, with masks of 0 to 100 %."""
    generator = np.random.default_rng(seed)
    lengths = generator.lognormal(np.log(mean), 1.2, num_documents).astype(np.int64) % 9_000 + 2
    texts = [np.append(generator.integers(0, EOD, length - 1), EOD) for length in lengths]
    masks = [generator.random(length) < generator.choice([0.0, 0.3, 0.7, 1.0]) for length in lengths]
    return texts, masks


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return masked_pair(tmp_path_factory.mktemp("pair") / "p", *drawn(2_000, mean=200, seed=1))


def export(folder, pair, length, most, multiple, **options):
    data = packed(None, [pair], sizes=(most, 0, 0), sequence_length=length, pack_multiple=multiple, **options)
    path = folder / "packs" / "training.idx.parquet"
    return data, path, write_packed_parquet(data, path, eos_id=EOD)


def read_row(row, length, multiple):
    """The batch of a row by the layout of the file: inputs are all ids of a segment but the last, labels all but the
    first, and what no segment fills is padding."""
    ends = [*row["seq_start_id"], len(row["input_ids"])]
    found = {name: [] for name in ("tokens", "labels", "loss_mask", "position_ids")}
    logical, padded = [0], [0]
    for number, (start, stop) in enumerate(pairwise(ends)):
        found["tokens"] += row["input_ids"][start : stop - 1]
        found["labels"] += row["input_ids"][start + 1 : stop]
        found["loss_mask"] += row["loss_mask"][start : stop - 1]
        found["position_ids"] += range(stop - start - 1)
        padded.append(len(found["tokens"]))
        logical.append(logical[-1] + row["seq_num_ids"][number] - 1)
    if padded[-1] < length:
        padded.append(length)
        logical.append(logical[-1])
    rest = [0] * (length - len(found["tokens"]))
    batch = {name: np.array(values + rest)[None] for name, values in found.items()}
    if multiple == 1:
        logical = padded  # without padding in a pack a batch of Megatron-Bridge has these borders alone
    return batch | {"cu_seqlens_q": np.array([logical]), "cu_seqlens_q_padded": np.array([padded])}


def check_same(ours, theirs, multiple):
    """Our batch in Megatron-Bridge's layout equals theirs; what no document fills has any ids."""
    used = ~ours["padding_mask"].numpy()
    for name in ("tokens", "labels"):
        assert np.array_equal(ours[name].numpy()[used], theirs[name][used]), name
    assert np.array_equal(ours["loss_mask"].numpy(), theirs["loss_mask"])
    padded = ours.get("cu_seqlens_q_padded", ours["cu_seqlens_q"]).numpy()
    if multiple > 1:
        assert np.array_equal(ours["cu_seqlens_q"].numpy(), theirs["cu_seqlens_q"])
        assert np.array_equal(padded, theirs["cu_seqlens_q_padded"])
    else:
        assert np.array_equal(padded, theirs["cu_seqlens_q"])
    segments = np.arange(used.shape[1]) < padded[0, -2 if not used[0, padded[0, -2] :].any() else -1]
    assert np.array_equal(ours["position_ids"].numpy()[0, segments], theirs["position_ids"][0, segments])


def batches_of(data):
    return BatchLoader(data, batch_size=1, layout="bridge", rank=0, num_ranks=1, shuffle_ranks=False)


@pytest.mark.parametrize(("length", "most"), slow_but([(512, 40)], LENGTHS))
@pytest.mark.parametrize("multiple", [1, 16])
def test_a_reader_of_the_layout_gets_our_batches(pair, tmp_path, length, most, multiple):
    data, path, report = export(tmp_path, pair, length, most, multiple)
    rows = pq.read_table(path).to_pylist()
    assert (len(rows), report.num_packs) == (most, most)
    trained = 0
    for ours, row in zip(batches_of(data), rows, strict=True):
        check_same(ours, read_row(row, length, multiple), multiple)
        trained += int(ours["num_trained_tokens"].sum())
        ends = [*row["seq_start_id"], len(row["input_ids"])]
        assert (np.diff(ends) % multiple == 1 % multiple).all()
        for start, own, stop in zip(row["seq_start_id"], row["seq_num_ids"], ends[1:], strict=True):
            assert set(row["input_ids"][start + own : stop]) <= {EOD}  # as Megatron-Bridge looks for padding
    assert trained == sum(sum(row["loss_mask"]) for row in rows) > 0
    assert (report.num_lost_labels, report.num_moved_ends) == (0, 0)


@needs_bridge
@pytest.mark.parametrize(("length", "most"), slow_but([(512, 40)], LENGTHS))
@pytest.mark.parametrize("multiple", [1, 16])
def test_megatron_bridge_gets_our_batches(pair, tmp_path, length, most, multiple):
    data, path, report = export(tmp_path, pair, length, most, multiple)
    asked = {"path": str(path), "metadata": str(metadata_path(path)), "output": str(tmp_path / "read.npz")}
    ask_bridge(tmp_path, what="read", eos_id=EOD, sequence_length=length, multiple=multiple, **asked)
    theirs = {"plain": {}, "padded": {}}
    for name, values in np.load(tmp_path / "read.npz").items():
        kind, number, key = name.split(".")
        theirs[kind].setdefault(int(number), {})[key] = values
    assert len(theirs["plain"]) == len(theirs["padded"]) == most
    for number, ours in enumerate(batches_of(data)):
        batch = theirs["plain"][number]
        check_same(ours, batch, multiple)
        # The rest of a pack is a segment of theirs, which may be the longest.
        rest = int((ours["padding_mask"].numpy()[0, ::-1].cumprod()).sum())
        longest, own = int(batch["max_seqlen_q"][0, 0]), int(ours["max_seqlen_q"][0, 0])
        assert longest == own or own < longest <= rest
    assert {one["cu_seqlens_q"].shape for one in theirs["padded"].values()} == {(1, report.most_segments + 2)}


def test_a_file_has_the_columns_and_row_groups_of_megatron_bridge(pair, tmp_path):
    _, path, report = export(tmp_path, pair, 128, 1_100, 4)
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)] == [500, 500, 100]
    int32, int8 = pa.list_(pa.int32()), pa.list_(pa.int8())
    names = ["input_ids", "loss_mask", "seq_start_id", "seq_num_ids"]
    assert list(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True)) == list(
        zip(names, [int32, int8, int32, int32], strict=True)
    )
    rows = file.read().to_pylist()
    counts = [len(row["seq_start_id"]) for row in rows]
    places = [len(row["input_ids"]) - count for row, count in zip(rows, counts, strict=True)]
    sizes = [np.diff([*row["seq_start_id"], len(row["input_ids"])]).max() - 1 for row in rows]
    assert json.loads(metadata_path(path).read_text()) == [
        {
            "dataset_max_seqlen": max(sizes),
            "max_samples_per_bin": max(counts),
            "packing_factor": round(sum(counts) / 1_100, 2),
            "packing_efficiency": round(100 * sum(places) / 1_100 / 128, 2),
            "pack_size": 128,
            "min_packed_seqlen": min(places),
        }
    ]
    assert sorted(one.name for one in path.parent.iterdir()) == ["training.idx.parquet", "training.metadata.json"]
    assert report.num_segments == sum(counts)


def test_what_megatron_bridge_reads_otherwise_is_counted(tmp_path):
    """An end token inside a document, and padded documents without one at the end or with two."""
    texts = [[1, EOD, 3, EOD], [1, 2, 3], [1, 2, EOD, EOD], [1, 2, EOD], [1, 2, 3, 4, 5]]
    masks = [np.ones(len(text), dtype=np.bool_) for text in texts]
    masks[2][-1] = False
    pair = masked_pair(tmp_path / "p", [np.array(text) for text in texts], masks)
    whole = packed(None, [pair], sizes=[None] * 3, sequence_length=8, pack_multiple=4)
    data = packed(None, [pair], sizes=(len(whole), 0, 0), sequence_length=8, pack_multiple=4)
    report = write_packed_parquet(data, tmp_path / "all.idx.parquet", eos_id=EOD)
    # Of the second document Megatron-Bridge finds 3 places in the place of 2, and of the third one 2 for 3.
    assert (report.num_segments, report.num_lost_labels, report.num_moved_ends) == (5, 1, 2)


def test_a_file_appears_as_a_whole_and_replaces_none(pair, tmp_path):
    data = packed(None, [pair], sizes=(50, 0, 0), sequence_length=64)
    path = tmp_path / "a.idx.parquet"

    def fail(done, total):
        if done == total:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_packed_parquet(data, path, eos_id=None, progress=fail)
    assert list(tmp_path.iterdir()) == []
    assert write_packed_parquet(data, path, eos_id=None, num_samples=3).num_packs == 3
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=r"a\.idx\.parquet: the file must not exist yet"):
        write_packed_parquet(data, path, eos_id=None)
    assert path.read_bytes() == before
    for number, message in ((0, r"in \[1, 50\], found 0"), (51, "found 51")):
        with pytest.raises(ArgumentError, match=message):
            write_packed_parquet(data, tmp_path / "b.idx.parquet", eos_id=None, num_samples=number)
    with pytest.raises(ArgumentError, match=r"must end in \.idx\.parquet or"):
        write_packed_parquet(data, tmp_path / "b.parquet", eos_id=None)
    padded = packed(None, [pair], sizes=(5, 0, 0), sequence_length=64, pack_multiple=2)
    with pytest.raises(ArgumentError, match="end token must be given for pack_multiple 2"):
        write_packed_parquet(padded, tmp_path / "b.idx.parquet", eos_id=None)
    other = packed(None, [pair], sizes=(5, 0, 0), sequence_length=64, order="instant")
    with pytest.raises(ArgumentError, match="in the order 'packed', found 'instant'"):
        write_packed_parquet(other, tmp_path / "b.idx.parquet", eos_id=None)


def documents_in(folder, path):
    """Ids and masks that `preprocess` reads from packed Parquet, each with its count."""
    chat.write_tokenizer(folder / "tokenizer.json")
    tokenizer = open_tokenizer(folder / "tokenizer.json", special_tokens=True)
    assert tokenizer.eod == 0
    config = PreprocessConfig(inputs=(path,), output=str(folder / "read"), chat=ChatConfig(), workers=1)
    preprocess(config, tokenizer)
    prefix = f"{folder / 'read'}_chat_document"
    found, trained = IndexedDataset(prefix), TrainedTokens.open(prefix)
    masks = (trained.of(number, len(found[number])) for number in range(len(found)))
    return Counter((tuple(ids.tolist()), tuple(mask.tolist())) for ids, mask in zip(found, masks, strict=True))


def wanted_of(texts, masks, length):
    """The pieces with a trained label, whose first token is none."""
    wanted = Counter()
    for text, mask in zip(texts, masks, strict=True):
        for start, stop in pieces_of_document(len(text), length, "split"):
            own = [False, *mask[start + 1 : stop + 1].tolist()]
            wanted[tuple(text[start : stop + 1].tolist()), tuple(own)] += any(own)
    return +wanted


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("has_column", [True, False])
def test_documents_of_packs_are_read_back(tmp_path, multiple, has_column):
    texts, masks = drawn(300, mean=30, seed=multiple)
    texts = [np.append(text[:-1] + 1, 0) for text in texts]  # the end token of the tokenizer is 0
    if has_column:
        texts.append(np.array([5, 0, 6, 7, 0, 0]))
        masks.append(np.array([True, True, True, False, False, False]))
    else:
        for mask in masks:
            mask[-1] = True  # an end token that is not trained looks as padding does
    pair = masked_pair(tmp_path / "p", texts, masks)
    size = len(packed(None, [pair], sizes=[None] * 3, sequence_length=64, pack_multiple=multiple))
    data = packed(None, [pair], sizes=(size, 0, 0), sequence_length=64, pack_multiple=multiple)
    path = tmp_path / "packs.idx.parquet"
    write_packed_parquet(data, path, eos_id=0)
    if not has_column:
        table = pq.read_table(path, columns=["input_ids", "loss_mask", "seq_start_id"])
        path = tmp_path / "plain.parquet"
        pq.write_table(table, path)
    assert documents_in(tmp_path, path) == wanted_of(texts, masks, 64)


@needs_bridge
@pytest.mark.parametrize("multiple", slow_but([16], [1, 16]))
def test_documents_that_megatron_bridge_packed_are_read(tmp_path, multiple):
    """Half of the documents end in an end token that is trained, and half in another token."""
    generator = np.random.default_rng(2)
    texts = [generator.integers(1, 1000, length) for length in generator.integers(2, 300, 500)]
    masks = [generator.random(len(text)) < 0.4 for text in texts]
    for text, mask in zip(texts[::2], masks[::2], strict=True):
        text[-1], mask[-1] = 0, True
    documents = [
        {"input_ids": text.tolist(), "loss_mask": mask.tolist()} for text, mask in zip(texts, masks, strict=True)
    ]
    path = tmp_path / "packs.idx.parquet"
    asked = {"documents": documents, "eos_id": 0, "sequence_length": 512, "multiple": multiple}
    ask_bridge(tmp_path, what="pack", output=str(path), **asked)
    assert documents_in(tmp_path, path) == wanted_of(texts, masks, 512)
