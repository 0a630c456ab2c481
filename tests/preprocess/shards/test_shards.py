import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers import with_files
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import ArgumentError, FormatError, PlanError
from trackbed.preprocess import PreprocessConfig, open_splitter, preprocess
from trackbed.tokens import merge, verify_content
from trackbed.tokens.seal import read_seal
from trackbed.tokens.shard_list import read_shard_list

TEXT = st.text(st.sampled_from("ab. C\n"), max_size=30)
RECORDS = st.lists(st.tuples(TEXT, TEXT), max_size=6)
KEYS = st.sampled_from([("text",), ("title",), ("text", "title")])
MOST_SHARDS = 4  # each waits for the disk
INPUTS = st.lists(st.tuples(st.sampled_from(["jsonl", "gz", "parquet"]), RECORDS), min_size=1, max_size=5)


class NamelessTokenizer:
    """Tokenizer that was not opened by name, and says nothing of its ids."""

    eod = 256
    vocab_size = 257

    def tokenize_batch(self, texts):
        return ByteTokenizer().tokenize_batch(texts)


def run(folder, *inputs, output="out", tokenizer=None, splitter=None, **options):
    config = PreprocessConfig(
        inputs=tuple(folder / name for name in inputs), output=str(folder / output), **{"workers": 1, **options}
    )
    return preprocess(config, tokenizer or ByteTokenizer(), splitter=splitter)


def write_lines(path, records, *, blank=False):
    lines = [json.dumps(record) + "\n" for record in records] + ["\n"] * blank
    path.write_text("".join(lines))


def write_input(folder, number, kind, records):
    rows = [{"text": text, "title": title} for text, title in records]
    path = folder / f"{number}.{'jsonl.gz' if kind == 'gz' else kind}"
    if kind == "parquet":
        schema = pa.schema({"text": pa.string(), "title": pa.string()})
        pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=2)
    elif kind == "gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), mtime=0))
    else:
        write_lines(path, rows, blank=number % 2 == 1)


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def merged(folder, key=None, name="whole"):
    merge(read_shard_list(folder / "out.toml", key=key), str(folder / name))
    return [(folder / f"{name}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def pair(prefix):
    return [Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx")]


def three_shards(folder, **options):
    """Three shards of two lines each."""
    write_lines(folder / "a.jsonl", [{"text": f"line {number}"} for number in range(6)])
    return run(folder, "a.jsonl", shard_bytes=38, **options)


def stamps(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("out-*")}


@settings(with_files, deadline=None)
@given(
    INPUTS,
    st.integers(1, 400),
    st.booleans(),
    st.booleans(),
    st.sampled_from([("text",), ("title",), ("text", "title")]),
)
def test_the_shards_merged_are_the_pair_written_without_shards(
    tmp_path_factory, inputs, shard_bytes, append_eod, split_sentences, keys
):
    folder = tmp_path_factory.mktemp("run")
    (folder / "in").mkdir()
    for number, (kind, records) in enumerate(inputs):
        write_input(folder / "in", number, kind, records)
    options = {
        "json_keys": keys,
        "append_eod": append_eod,
        "allow_empty": True,
        "splitter": open_splitter() if split_sentences else None,
        "chunk_bytes": 50,
    }
    whole = run(folder, "in", output="one", **options)
    shard_bytes = max(shard_bytes, whole.input_bytes // MOST_SHARDS + 1)
    made = run(folder, "in", shard_bytes=shard_bytes, **options)
    level = "sentence" if split_sentences else "document"
    for key in keys:
        assert merged(folder, key if len(keys) > 1 else None) == pair(folder / f"one_{key}_{level}")
    for one, other in zip(whole.outputs, made.outputs, strict=True):
        assert replace(one, prefix="") == replace(other, prefix="")
    counts = ("files", "input_bytes", "records", "blank", "bad", "left_out_files")
    assert [getattr(made, name) for name in counts] == [getattr(whole, name) for name in counts]
    assert made.shards == max(1, -(-whole.input_bytes // shard_bytes))


@settings(with_files, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=5), st.integers(1, 60))
def test_plain_texts_lie_whole_in_a_shard(tmp_path_factory, texts, shard_bytes):
    folder = tmp_path_factory.mktemp("run")
    (folder / "in").mkdir()
    for number, text in enumerate(texts):
        (folder / "in" / f"{number}.txt").write_text(text)
    whole = run(folder, "in", output="one", allow_empty=True)
    run(folder, "in", shard_bytes=max(shard_bytes, whole.input_bytes // MOST_SHARDS + 1), allow_empty=True)
    assert merged(folder) == pair(folder / "one_text_document")


def test_shards_are_named_by_number_count_and_key_and_listed(tmp_path):
    report = three_shards(tmp_path)
    names = [f"out-0000{number}-of-00003_text_document" for number in range(3)]
    made = {f"{name}{suffix}" for name in names for suffix in (".bin", ".idx", ".trackbed.json")}
    assert files_in(tmp_path).keys() == {"a.jsonl", "out.toml", *made}
    assert read_shard_list(tmp_path / "out.toml") == [str(tmp_path / name) for name in names]
    assert (report.shards, report.finished_shards) == (3, 0)
    assert report.shard_list == str(tmp_path / "out.toml")
    assert [verify_content(str(tmp_path / name)).documents for name in names] == [2, 2, 2]


def test_a_line_belongs_to_the_shard_of_its_first_byte(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "x" * 80}, {"text": "y"}, {"text": "z"}])  # 93, 14 and 14 bytes
    run(tmp_path, "a.jsonl", shard_bytes=40)
    found = [verify_content(prefix).documents for prefix in read_shard_list(tmp_path / "out.toml")]
    assert found == [1, 0, 2, 0]  # the third line begins at byte 107, in [80, 120)


def test_finished_shards_are_not_made_again(tmp_path):
    three_shards(tmp_path)
    before = stamps(tmp_path)
    again = three_shards_again(tmp_path)
    assert again.finished_shards == 3
    assert stamps(tmp_path) == before


def three_shards_again(folder, **options):
    return run(folder, "a.jsonl", shard_bytes=38, **options)


@pytest.mark.parametrize("lost", [".bin", ".idx", ".trackbed.json"])
def test_a_shard_that_lacks_a_file_is_made_again(tmp_path, lost):
    first = three_shards(tmp_path)
    before = files_in(tmp_path)
    (tmp_path / f"out-00001-of-00003_text_document{lost}").unlink()
    again = three_shards_again(tmp_path)
    assert again.finished_shards == 2
    assert files_in(tmp_path) == before
    assert replace(again, finished_shards=0, kept_bytes=0) == first


def test_a_shard_whose_file_was_cut_is_made_again(tmp_path):
    three_shards(tmp_path)
    before = files_in(tmp_path)
    os.truncate(tmp_path / "out-00000-of-00003_text_document.bin", 3)
    assert three_shards_again(tmp_path).finished_shards == 2
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"append_eod": True}, "eod: null, now 256"),
        ({"max_record_bytes": 1000}, "max_record_bytes: 1073741824, now 1000"),
    ],
)
def test_a_shard_that_was_made_in_another_way_is_an_error_that_names_the_difference(tmp_path, options, difference):
    three_shards(tmp_path)
    before = files_in(tmp_path)
    with pytest.raises(ArgumentError, match=f"the same way, found {difference}; --overwrite replaces it"):
        three_shards_again(tmp_path, **options)
    assert files_in(tmp_path) == before
    assert three_shards_again(tmp_path, overwrite=True, **options).finished_shards == 0
    assert three_shards_again(tmp_path, **options).finished_shards == 3


def test_an_input_that_was_written_again_is_a_difference(tmp_path):
    three_shards(tmp_path)
    write_lines(tmp_path / "a.jsonl", [{"text": f"LINE {number}"} for number in range(6)])
    with pytest.raises(ArgumentError, match="input_versions: "):
        three_shards_again(tmp_path)


def test_a_pair_that_is_no_shard_is_not_replaced(tmp_path):
    three_shards(tmp_path)
    seal = tmp_path / "out-00001-of-00003_text_document.trackbed.json"
    fields = json.loads(seal.read_text())
    seal.write_text(json.dumps({key: fields[key] for key in fields if key not in ("made_by", "recipe", "counts")}))
    with pytest.raises(ArgumentError, match="found a pair that is no shard"):
        three_shards_again(tmp_path)


def test_the_seal_says_how_the_shard_was_made(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": ""}])
    run(tmp_path, "a.jsonl", shard_bytes=1000)
    seal = read_seal(tmp_path / "out-00000-of-00001_text_document.trackbed.json")
    assert len(seal.made_by) == 64
    assert seal.recipe["tokenizer"] == "bytes"
    read = {"text_bytes": 29, "records": 2, "blank": 0, "bad": 0, "lines": 2, "first_bad": []}
    assert seal.counts == {**read, "dropped": 1, "unknown": None}


def test_a_bad_record_is_named_by_its_line_in_the_whole_file(tmp_path):
    lines = [json.dumps({"text": f"line {number}"}) for number in range(9)]
    lines[7] = "no JSON"
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(FormatError, match=r"a\.jsonl:8: a line must be JSON"):
        run(tmp_path, "a.jsonl", shard_bytes=30)
    assert not (tmp_path / "out.toml").exists()


@settings(with_files, deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=3), st.integers(5, 100))
def test_skipped_records_are_named_by_their_lines_too(tmp_path_factory, files, shard_bytes):
    folder = tmp_path_factory.mktemp("run")
    (folder / "in").mkdir()
    for number, lines in enumerate(files):
        texts = ['{"text": "good"}\n' if good else "no JSON\n" for good in lines]
        (folder / "in" / f"{number}.jsonl").write_text("".join(texts))
    options = {"skip_bad": True, "allow_empty": True, "chunk_bytes": 20}
    whole = run(folder, "in", output="one", **options)
    shard_bytes = max(shard_bytes, whole.input_bytes // MOST_SHARDS + 1)
    made = run(folder, "in", shard_bytes=shard_bytes, **options)
    again = run(folder, "in", shard_bytes=shard_bytes, **options)
    assert made.first_bad == whole.first_bad
    assert again.first_bad == whole.first_bad
    assert made.bad == again.bad == whole.bad


def test_shards_with_skipped_records_do_not_fit_a_run_that_skips_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nno JSON\n')
    run(tmp_path, "a.jsonl", shard_bytes=100, skip_bad=True)
    with pytest.raises(ArgumentError, match="found 1 bad records that were skipped"):
        run(tmp_path, "a.jsonl", shard_bytes=100)
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n')
    run(tmp_path, "a.jsonl", shard_bytes=100, overwrite=True)
    assert run(tmp_path, "a.jsonl", shard_bytes=100, skip_bad=True).finished_shards == 1


def test_a_run_without_documents_is_refused_and_its_list_is_not_written(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(PlanError, match="at least one document"):
        run(tmp_path, "a.jsonl", shard_bytes=1)
    assert not (tmp_path / "out.toml").exists()
    assert run(tmp_path, "a.jsonl", shard_bytes=1, allow_empty=True).shards == 2


def test_a_tokenizer_needs_a_fingerprint(tmp_path):
    with pytest.raises(ArgumentError, match="NamelessTokenizer: a tokenizer must have a fingerprint"):
        three_shards(tmp_path, tokenizer=NamelessTokenizer())


def test_a_tokenizer_that_was_not_opened_by_name_is_sent_whole(tmp_path):
    tokenizer = NamelessTokenizer()
    tokenizer.fingerprint = "bytes, my way"
    three_shards(tmp_path, tokenizer=tokenizer)
    assert read_seal(next(tmp_path.glob("*.json"))).recipe["tokenizer"] == "bytes, my way"


def test_the_output_may_lie_in_the_folder_of_the_inputs(tmp_path):
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", [{"text": "one"}])
    for _ in range(2):
        report = run(tmp_path, "in", output="in/out", shard_bytes=10, input_format="jsonl")
        assert (report.files, report.records) == (1, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_bytes": 0}, "shard_bytes must be at least 1, found 0"),
        ({"overwrite": True}, "overwrite must be combined with shard_bytes"),
        ({"engine": "ray"}, "engine 'ray' must be combined with shard_bytes"),
        ({"engine": "spark", "shard_bytes": 1}, "engine must be one of local, ray"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        PreprocessConfig(inputs=(Path("a"),), output="out", **options)
