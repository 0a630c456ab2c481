"""Several keys of one record: the documents of their pairs correspond."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.files.blends import build as build_datasets
from tests.support.files.blends import gpt_config
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import ArgumentError, PlanError
from trackbed.preprocess import PreprocessConfig, inspect_pair, preprocess
from trackbed.preprocess.columns import Documents, fill_empty, leave_out, without_tokens
from trackbed.tokens import IndexedDataset, verify_content

RECORDS = [
    {"a": "first", "b": "one"},
    {"a": "", "b": "two"},
    {"a": "third", "b": ""},
    {"a": "", "b": ""},
    {"a": "fifth", "b": "five"},
]


class Lines:
    """A splitter at line ends."""

    fingerprint = "lines"

    def split(self, text):
        return [line for line in text.split("\n") if line]


def write(folder, records=RECORDS):
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "in.jsonl"


def run(path, splitter=None, **options):
    config = PreprocessConfig(
        inputs=(path,), output=str(path.parent / "out"), json_keys=("a", "b"), **{"workers": 1, **options}
    )
    return preprocess(config, ByteTokenizer(), splitter=splitter)


def pair(folder, key, level="document"):
    return IndexedDataset(str(folder / f"out_{key}_{level}"))


def texts(folder, key):
    return [ByteTokenizer().detokenize(tokens) for tokens in pair(folder, key)]


def test_an_empty_text_is_one_sequence_of_no_token(tmp_path):
    report = run(write(tmp_path))
    assert texts(tmp_path, "a") == ["first", "", "third", "", "fifth"]
    assert texts(tmp_path, "b") == ["one", "two", "", "", "five"]
    assert pair(tmp_path, "a").document_indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert [(one.documents, one.sequences, one.empty, one.dropped) for one in report.outputs] == [(5, 5, 2, 0)] * 2


def test_with_end_tokens_it_is_the_end_token_alone(tmp_path):
    run(write(tmp_path), append_eod=True)
    assert texts(tmp_path, "a") == ["first<eod>", "<eod>", "third<eod>", "<eod>", "fifth<eod>"]


def test_records_with_an_empty_text_can_be_left_out_of_all_pairs(tmp_path):
    report = run(write(tmp_path), drop_record=True, append_eod=True)
    assert texts(tmp_path, "a") == ["first<eod>", "fifth<eod>"]
    assert texts(tmp_path, "b") == ["one<eod>", "five<eod>"]
    assert [(one.documents, one.empty, one.dropped) for one in report.outputs] == [(2, 0, 3)] * 2


def test_a_record_is_dropped_only_where_there_are_several_keys(tmp_path):
    with pytest.raises(ArgumentError, match="drop_record must be combined with several json_keys, found"):
        PreprocessConfig(inputs=(tmp_path,), output="out", drop_record=True)


def test_without_empty_texts_neither_changes_a_byte(tmp_path):
    path = write(tmp_path, [RECORDS[0], RECORDS[4]] * 20)
    run(path)
    before = [(tmp_path / f"out_a_document{suffix}").read_bytes() for suffix in (".bin", ".idx")]
    run(path, drop_record=True)
    assert [(tmp_path / f"out_a_document{suffix}").read_bytes() for suffix in (".bin", ".idx")] == before
    preprocess(PreprocessConfig(inputs=(path,), output=str(tmp_path / "out"), json_keys=("a",)), ByteTokenizer())
    assert [(tmp_path / f"out_a_document{suffix}").read_bytes() for suffix in (".bin", ".idx")] == before


def test_sentences_correspond_by_document(tmp_path):
    records = [{"a": "x\ny", "b": "z"}, {"a": "\n\n", "b": "v\nw"}, {"a": "", "b": ""}]
    run(write(tmp_path, records), splitter=Lines(), append_eod=True)
    assert pair(tmp_path, "a", "sentence").document_indices.tolist() == [0, 2, 3, 4]
    assert pair(tmp_path, "b", "sentence").document_indices.tolist() == [0, 1, 3, 4]
    run(write(tmp_path, records), splitter=Lines(), drop_record=True)
    assert pair(tmp_path, "a", "sentence").document_indices.tolist() == [0, 2]


def test_a_key_without_any_text_is_refused_unless_that_is_allowed(tmp_path):
    path = write(tmp_path, [{"a": "", "b": "x"}] * 3)
    with pytest.raises(PlanError, match="out_a_document: a pair must have at least one document with text, found none"):
        run(path)
    with pytest.raises(PlanError, match="a pair must have at least one document, found none in 3 records"):
        run(path, drop_record=True)
    run(path, allow_empty=True)
    assert len(pair(tmp_path, "a")) == len(pair(tmp_path, "b")) == 3
    assert pair(tmp_path, "a")[1].tolist() == []


def test_rows_of_parquet_correspond_too(tmp_path):
    columns = {key: [record[key] for record in RECORDS] for key in ("a", "b")}
    pq.write_table(pa.table(columns), tmp_path / "in.parquet", row_group_size=2)
    run(tmp_path / "in.parquet")
    assert texts(tmp_path, "b") == ["one", "two", "", "", "five"]


def test_bad_records_are_in_no_pair(tmp_path):
    path = write(tmp_path, [*RECORDS, {"a": 1, "b": ""}, {"a": "", "b": None}, {"a": "x", "b": "y"}])
    report = run(path, skip_bad=True)
    assert report.bad == 2
    assert texts(tmp_path, "a")[4:] == ["fifth", "x"]
    assert texts(tmp_path, "b")[4:] == ["five", "y"]


@pytest.mark.parametrize("drop_record", [False, True])
def test_shards_and_workers_change_nothing(tmp_path, drop_record):
    path = write(tmp_path, RECORDS * 30)
    whole = run(path, drop_record=drop_record, append_eod=True)
    wanted = {key: texts(tmp_path, key) for key in "ab"}
    run(path, drop_record=drop_record, append_eod=True, workers=2, chunk_bytes=100)
    assert {key: texts(tmp_path, key) for key in "ab"} == wanted
    shards = run(path, drop_record=drop_record, append_eod=True, shard_bytes=700)
    assert [(one.documents, one.empty, one.dropped) for one in shards.outputs] == [
        (one.documents, one.empty, one.dropped) for one in whole.outputs
    ]
    names = sorted(tmp_path.glob("out-*_a_document.idx"))
    found = [text for name in names for text in map(ByteTokenizer().detokenize, IndexedDataset(str(name)[:-4]))]
    assert found == wanted["a"]


def test_shards_that_were_made_with_the_other_rule_are_told(tmp_path):
    path = write(tmp_path, RECORDS * 30)
    run(path, shard_bytes=700)
    with pytest.raises(ArgumentError, match="drop_record"):
        run(path, shard_bytes=700, drop_record=True)


@pytest.mark.parametrize("drop_record", [False, True])
def test_a_run_that_goes_on_writes_the_same_pairs(tmp_path, drop_record):
    path = write(tmp_path, RECORDS * 200)
    options = {"drop_record": drop_record, "append_eod": True, "chunk_bytes": 500, "save_interval_bytes": 1500}
    whole = run(path, **options)
    wanted = {path.name: path.read_bytes() for path in tmp_path.glob("out_*_document.*")}
    for made in tmp_path.glob("out_*"):
        made.unlink()

    class Failing(ByteTokenizer):
        calls = 0

        def tokenize_batch(self, texts):
            Failing.calls += 1
            if Failing.calls > 20:
                raise KeyboardInterrupt
            return super().tokenize_batch(texts)

    config = PreprocessConfig(inputs=(path,), output=str(tmp_path / "out"), json_keys=("a", "b"), workers=1, **options)
    with pytest.raises(KeyboardInterrupt):
        preprocess(config, Failing())
    resumed = preprocess(config, ByteTokenizer())
    assert resumed.kept_bytes > 0
    assert resumed.outputs == whole.outputs
    assert {path.name: path.read_bytes() for path in tmp_path.glob("out_*_document.*")} == wanted


@pytest.mark.parametrize("order", ["megatron", "balanced", "instant"])
@pytest.mark.parametrize("append_eod", [False, True])
def test_datasets_of_all_orders_read_pairs_with_empty_sequences(tmp_path, order, append_eod):
    records = [{"a": "some words " * 3 if number % 3 else "", "b": "x"} for number in range(60)]
    run(write(tmp_path, records), append_eod=append_eod)
    prefix = str(tmp_path / "out_a_document")
    assert verify_content(prefix).documents == 60
    assert inspect_pair(prefix).documents == 60
    train, *_ = build_datasets(
        gpt_config(tmp_path / "cache", blend=([prefix], None), split="1", order=order), (40, 0, 0)
    )
    tokens = sorted(token for number in range(len(train)) for token in train[number]["tokens"].tolist())
    assert set(tokens) == set(np.concatenate(list(IndexedDataset(prefix))).tolist())


def test_megatron_core_reads_them_too(tmp_path):
    pytest.importorskip("megatron.core")
    run(write(tmp_path))
    program = (
        "import sys, warnings; warnings.simplefilter('ignore');"
        "from megatron.core.datasets.indexed_dataset import IndexedDataset;"
        "print([row.tolist() for row in map(IndexedDataset(sys.argv[1]).__getitem__, range(5))])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "out_b_document")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert json.loads(done.stdout) == [list(text.encode()) for text in ("one", "two", "", "", "five")]


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=3), max_size=6)


def arrays(documents):
    return Documents(
        np.array([token for one in documents for sequence in one for token in sequence], dtype=np.int64),
        np.array([len(sequence) for one in documents for sequence in one], dtype=np.int64),
        np.array([len(one) for one in documents], dtype=np.int64),
    )


@settings(deadline=None)
@given(DOCUMENTS, st.data())
def test_documents_are_left_out_with_all_that_is_in_them(documents, data):
    marks = np.array([data.draw(st.booleans()) for _ in documents], dtype=bool)
    assert without_tokens(arrays(documents)).tolist() == [not any(one) for one in documents]
    (found,) = leave_out([arrays(documents)], marks)
    wanted = arrays([one for one, mark in zip(documents, marks, strict=True) if not mark])
    assert all((ours == theirs).all() for ours, theirs in zip(found, wanted, strict=True))


@given(DOCUMENTS)
def test_only_documents_without_sequences_get_one(documents):
    _, lengths, counts = arrays(documents)
    wanted = arrays([one or [[]] for one in documents])
    found = fill_empty(lengths, counts)
    assert (found[0].tolist(), found[1].tolist()) == (wanted.lengths.tolist(), wanted.counts.tolist())
