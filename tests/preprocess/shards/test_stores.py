"""Inputs and outputs in object stores."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.files.stored_pairs import open_stored
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import ArgumentError, FormatError, StoreError
from trackbed.files import stores
from trackbed.preprocess import PreprocessConfig, preprocess
from trackbed.preprocess.inputs import find_inputs
from trackbed.preprocess.open_input import open_input
from trackbed.preprocess.shards.shard_files import ShardRequirements, StoreShard
from trackbed.preprocess.shards.spec import made_by

RECIPE = {"tokenizer": "bytes"}
SUFFIXES = (".bin", ".idx", ".trackbed.json")


def run(inputs, output, **options):
    return preprocess(PreprocessConfig(inputs=inputs, output=output, **{"workers": 1, **options}), ByteTokenizer())


def write_corpus(folder):
    """JSON lines, plain and packed, and Parquet, in folders that a store sorts in another way than paths."""
    records = [{"text": f"text {number} " * 20} for number in range(30)]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    for name, content in (
        ("a-b/1.jsonl", lines.encode()),
        ("a/2.jsonl", lines.encode()),
        ("a/3.jsonl.gz", gzip.compress(lines.encode(), mtime=0)),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    pq.write_table(pa.Table.from_pylist(records), folder / "a" / "4.parquet", row_group_size=7)
    (folder / "a" / "readme").write_text("no input")


@pytest.fixture
def corpus(tmp_path):
    write_corpus(tmp_path / "in")
    return tmp_path / "in"


@pytest.fixture
def uploaded(corpus, bucket):
    """The corpus in a bucket."""
    for path in sorted(corpus.rglob("*")):
        if path.is_file():
            bucket.put(f"in/{path.relative_to(corpus)}", path.read_bytes())
    return bucket


def files_of(bucket, folder="out/"):
    keys = bucket.keys()
    return {key.removeprefix(folder): bucket.get(key) for key in keys if key.startswith(folder)}


def without_recipes(files):
    """Files whose bytes do not depend on the names of the inputs."""
    return {name: raw for name, raw in files.items() if not name.endswith(".trackbed.json")}


@pytest.mark.parametrize("workers", [1, 2])
def test_from_a_bucket_to_a_bucket_the_bytes_are_those_of_a_disk(corpus, uploaded, tmp_path, workers):
    options = {"shard_bytes": 3000, "append_eod": True}
    (tmp_path / "out").mkdir()
    here = run((corpus,), str(tmp_path / "out" / "c"), **options)
    there = run((uploaded.text("in"),), uploaded.text("out/c"), workers=workers, **options)
    local = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    found = files_of(uploaded)
    assert without_recipes(found) == without_recipes(local)
    assert found.keys() == local.keys()
    assert (there.records, there.files, there.left_out_files) == (here.records, 4, 1)
    again = run((uploaded.text("in"),), uploaded.text("out/c"), **options)
    assert again.finished_shards == again.shards == there.shards > 3
    assert files_of(uploaded) == found


def test_a_pair_on_a_disk_is_made_of_objects_too(corpus, uploaded, tmp_path):
    run((corpus,), str(tmp_path / "here"))
    run((uploaded.text("in"),), str(tmp_path / "there"), workers=2)
    for suffix in (".bin", ".idx"):
        here, there = (tmp_path / f"{name}_text_document{suffix}" for name in ("here", "there"))
        assert here.read_bytes() == there.read_bytes()


def test_objects_are_sorted_as_paths_are(corpus, uploaded):
    keys = uploaded.keys()
    listed = [key.removeprefix("in/") for key in keys]
    found = [file.address.key.removeprefix("in/") for file in find_inputs([uploaded.text("in")]).files]
    wanted = [str(file.path.relative_to(corpus)) for file in find_inputs([corpus]).files]
    assert found == wanted
    assert found != [name for name in listed if name != "a/readme"]


def test_hidden_objects_below_an_address_are_left_out_and_named_ones_are_read(uploaded):
    for key in ("in/_temporary/0/x.jsonl", "in/_temporary/1/y.jsonl", "in/a/.z.jsonl"):
        uploaded.put(key, b'{"text": "x"}\n')
    found = find_inputs([uploaded.text("in")])
    assert len(found.files) == 4
    assert [(one.name, one.reason.value) for one in found.skipped] == [
        (uploaded.text("in/_temporary"), "hidden"),
        (uploaded.text("in/a/.z.jsonl"), "hidden"),
        (uploaded.text("in/a/readme"), "unknown suffix"),
    ]
    assert len(find_inputs([uploaded.text("in/_temporary")]).files) == 2
    assert len(find_inputs([uploaded.text("in/a/.z.jsonl")]).files) == 1


def test_an_object_that_is_given_twice_is_read_once(uploaded):
    found = find_inputs([uploaded.text("in/a/2.jsonl"), uploaded.text("in"), uploaded.text("in/a/2.jsonl")])
    assert [file.address.key for file in found.files] == [
        "in/a/2.jsonl",
        "in/a/3.jsonl.gz",
        "in/a/4.parquet",
        "in/a-b/1.jsonl",
    ]
    assert [one.reason.value for one in found.skipped].count("given twice") == 2


def test_a_pointer_of_git_lfs_in_a_bucket_is_an_error(uploaded):
    oid = b"4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    content = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + oid + b"\nsize 12345\n"
    uploaded.put("in/a/5.jsonl", content)
    for name in ("in", "in/a/5.jsonl"):
        with pytest.raises(ArgumentError, match=r"in/a/5\.jsonl: an input must hold its content, .*`git lfs pull`"):
            find_inputs([uploaded.text(name)])


def test_plain_texts_beside_records_in_a_bucket_are_named(uploaded, caplog):
    uploaded.put("in/README.md", b"a note")
    find_inputs([uploaded.text("in")])
    assert "in/README.md" in caplog.text


def test_an_object_that_was_written_again_is_a_difference(uploaded):
    run((uploaded.text("in"),), uploaded.text("out/c"), shard_bytes=3000)
    uploaded.put("in/a/2.jsonl", uploaded.get("in/a/2.jsonl").replace(b"text 1", b"TEXT 1"))
    with pytest.raises(ArgumentError, match="input_versions"):
        run((uploaded.text("in"),), uploaded.text("out/c"), shard_bytes=3000)


def test_an_object_that_is_replaced_after_planning_is_an_error(uploaded):
    (file,) = find_inputs([uploaded.text("in/a/2.jsonl")]).files
    uploaded.put("in/a/2.jsonl", uploaded.get("in/a/2.jsonl").replace(b"text 1", b"TEXT 1"))
    with open_input(file) as raw, pytest.raises(StoreError, match=r"in/a/2\.jsonl"):
        raw.read(10)


def test_a_bad_record_is_named_by_address_and_line(uploaded):
    uploaded.put("in/a/2.jsonl", b'{"text": "good"}\n' * 8 + b"no JSON\n")
    with pytest.raises(FormatError, match=r"^s3://.*/in/a/2\.jsonl:9: a line must be JSON"):
        run((uploaded.text("in/a/2.jsonl"),), uploaded.text("out/c"), shard_bytes=50)


def test_reads_of_an_object_give_its_bytes_wherever_they_begin(bucket):
    data = np.random.default_rng(1).bytes(3_000_000)
    bucket.put("a.txt", data)
    (file,) = find_inputs([bucket.text("a.txt")]).files
    with open_input(file) as raw:
        assert raw.read() == data
        for start, count in ((5, 10), (2_999_990, 100), (1_000_000, 900_000), (0, 1), (3_000_000, 1)):
            raw.seek(start)
            assert raw.read(count) == data[start : start + count]
            assert raw.tell() == min(start + count, len(data))


def test_what_trackbed_writes_into_a_folder_is_no_input(uploaded):
    options = {"shard_bytes": 3000, "input_format": "jsonl"}
    uploaded.delete("in/a/4.parquet")
    uploaded.delete("in/a/readme")
    first = run((uploaded.text("in"),), uploaded.text("in/c"), **options)
    again = run((uploaded.text("in"),), uploaded.text("in/c"), **options)
    assert (again.files, again.finished_shards) == (first.files, first.shards)


@pytest.mark.parametrize(
    ("inputs", "output", "message"),
    [
        ("s3://b/in", "s3://b/out/c", "must be combined with shard_bytes"),
        ("a", "http://host/c", "an output must have a key in a store that can be written to"),
        ("a", "s3://bucket", "an output must have a key"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(inputs, output, message):
    options = {"shard_bytes": 1} if "shard_bytes" not in message else {}
    with pytest.raises(ArgumentError, match=message):
        PreprocessConfig(inputs=(inputs,), output=output, **options)


def test_a_folder_without_objects_is_refused(bucket):
    with pytest.raises(ArgumentError, match="must be an object or a folder of objects, found nothing"):
        find_inputs([bucket.text("nothing")])


def shard_in(bucket, *, recipe=RECIPE, overwrite=False):
    return StoreShard(ShardRequirements(prefix=bucket.text("c"), recipe=recipe, skip_bad=False, overwrite=overwrite))


def built(shard, tokens=(1, 2, 3)):
    builder = shard.open_builder("uint16")
    builder.add_documents(np.array(tokens, dtype=np.uint16), [len(tokens)])
    return builder


def publish(shard, builder):
    recipe = shard.wanted.recipe
    try:
        return shard.publish(
            builder, sign=lambda seal: replace(seal, made_by=made_by(recipe), recipe=recipe, counts={"bad": 0})
        )
    finally:
        shard.close()


def test_the_first_seal_in_a_bucket_wins(bucket):
    first, second = shard_in(bucket), shard_in(bucket)
    one, other = built(first), built(second)
    made = publish(first, one)
    assert publish(second, other) == made
    assert {f"c{suffix}" for suffix in SUFFIXES} == set(bucket.keys())


def test_a_seal_that_appears_during_the_upload_is_accepted_or_refused_by_its_recipe(bucket, monkeypatch):
    """Another worker publishes between the first look at the seal and the conditional put."""

    def put_after_another(address, raw, *, recipe):
        monkeypatch.setattr(stores, "put_if_absent", original)
        another = shard_in(bucket, recipe=recipe)
        publish(another, built(another))
        return original(address, raw)

    original = stores.put_if_absent
    monkeypatch.setattr(stores, "put_if_absent", lambda *arguments: put_after_another(*arguments, recipe=RECIPE))
    shard = shard_in(bucket)
    assert publish(shard, built(shard)).made_by == made_by(RECIPE)
    for suffix in SUFFIXES:
        bucket.delete(f"c{suffix}")
    other = {"tokenizer": "other"}
    monkeypatch.setattr(stores, "put_if_absent", lambda *arguments: put_after_another(*arguments, recipe=other))
    with pytest.raises(ArgumentError, match='found tokenizer: "other", now "bytes"'):
        publish(shard, built(shard))


def test_a_shard_of_another_recipe_is_replaced_on_demand_and_loses_its_seal_first(bucket, monkeypatch):
    shard = shard_in(bucket)
    publish(shard, built(shard))
    other = shard_in(bucket, recipe={"tokenizer": "other"})
    with pytest.raises(ArgumentError, match="made in the same way"):
        publish(other, built(other))
    other = shard_in(bucket, recipe={"tokenizer": "other"}, overwrite=True)
    seen = []
    original = stores.put_file
    monkeypatch.setattr(
        stores, "put_file", lambda *arguments: (seen.append(set(bucket.keys())), original(*arguments))[1]
    )
    assert publish(other, built(other, (7,))).recipe == {"tokenizer": "other"}
    assert all("c.trackbed.json" not in keys for keys in seen)


def test_no_temporary_file_stays(uploaded, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    run((uploaded.text("in"),), uploaded.text("out/c"), shard_bytes=3000)
    assert not list(Path(tmp_path).glob("trackbed-*"))


def prefix_of(bucket):
    (prefix,) = {key.removesuffix(".bin") for key in bucket.keys() if key.endswith(".bin")}  # noqa: SIM118
    return bucket.text(prefix)


@pytest.mark.parametrize("step", [0, 1])
def test_a_shard_whose_replacement_stops_half_way_cannot_be_opened(uploaded, monkeypatch, tmp_path, step):
    options = {"shard_bytes": 10**6, "workers": 1}
    run((uploaded.text("in/a/2.jsonl"),), uploaded.text("out/c"), **options)
    steps = iter(range(9))

    def put_file(address, path, **others):
        if next(steps) == step:
            raise StoreError("it stops here")
        return put(address, path, **others)

    put = stores.put_file
    monkeypatch.setattr(stores, "put_file", put_file)
    with pytest.raises(StoreError, match="it stops here"):
        run((uploaded.text("in/a/2.jsonl"),), uploaded.text("out/c"), append_eod=True, overwrite=True, **options)
    with pytest.raises(ArgumentError, match=r"missing .*\.idx"):
        open_stored(prefix_of(uploaded), tmp_path / "idx")


def test_a_late_worker_of_another_run_leaves_no_seal_over_its_files(uploaded, monkeypatch, tmp_path):
    inputs, output = (uploaded.text("in/a/2.jsonl"),), uploaded.text("out/c")
    options = {"shard_bytes": 10**6, "workers": 1}
    put = stores.put_file

    def put_file(address, path, **others):
        """The other run makes the shard while this one is about to put its first file."""
        monkeypatch.setattr(stores, "put_file", put)
        run(inputs, output, append_eod=True, **options)
        return put(address, path, **others)

    monkeypatch.setattr(stores, "put_file", put_file)
    with pytest.raises(ArgumentError, match="one run at a time must write shards there, found the seal of another"):
        run(inputs, output, **options)
    assert not any(key.endswith(".trackbed.json") for key in uploaded.keys())  # noqa: SIM118
    assert run(inputs, output, append_eod=True, **options).finished_shards == 0
    assert open_stored(prefix_of(uploaded), tmp_path / "idx")[0][-1] == 256
