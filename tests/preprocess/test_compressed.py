"""Compressed files and Parquet give the same pair as the same texts in plain files."""

import gzip
import json
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiers import with_files
from trackbed.datasets.tokenizers.bytes_and_numbers import ByteTokenizer
from trackbed.errors import FormatError, PlanError
from trackbed.preprocess import PreprocessConfig, preprocess
from trackbed.preprocess.chunks import plan_chunks
from trackbed.preprocess.inputs import find_inputs
from trackbed.preprocess.records import read_lines
from trackbed.tokens import IndexedDataset

COMPRESS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}
TEXTS = ["one", "", " zwei\u2028 ", "東京 <|endoftext|>", "x" * 5000, "last"]


def lines_of(texts):
    return "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()


def run(folder, *inputs, **options):
    config = PreprocessConfig(
        inputs=tuple(folder / name for name in inputs), output=str(folder / "out"), **{"workers": 1, **options}
    )
    return preprocess(config, ByteTokenizer())


def texts_in(folder, key="text"):
    return [ByteTokenizer().detokenize(tokens) for tokens in IndexedDataset(str(folder / f"out_{key}_document"))]


def write_table(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("end", COMPRESS)
def test_compressed_lines_give_what_plain_ones_give(tmp_path, end, workers):
    (tmp_path / f"a.jsonl{end}").write_bytes(COMPRESS[end](lines_of(TEXTS * 40)))
    (tmp_path / "b.jsonl").write_bytes(lines_of(["after"]))
    report = run(tmp_path, f"a.jsonl{end}", "b.jsonl", workers=workers, chunk_bytes=3000)
    assert texts_in(tmp_path) == [text for text in TEXTS if text] * 40 + ["after"]
    assert (report.records, report.outputs[0].dropped) == (241, 40)
    assert report.input_bytes == sum((tmp_path / name).stat().st_size for name in (f"a.jsonl{end}", "b.jsonl"))
    assert report.text_bytes == len(lines_of(TEXTS * 40)) + len(lines_of(["after"]))
    assert run(tmp_path, "b.jsonl").text_bytes is None
    assert run(tmp_path, f"a.jsonl{end}", shard_bytes=1 << 20).text_bytes == len(lines_of(TEXTS * 40))


@with_files
@given(
    raw=st.lists(st.sampled_from([b"\n", b"\r", b"a", b"bc" * 30, b"\xc2\x85"]), max_size=40).map(b"".join),
    chunk_bytes=st.integers(1, 50),
    end=st.sampled_from([*COMPRESS]),
    members=st.integers(1, 3),
)
def test_however_a_compressed_file_is_cut_its_lines_are_those_between_line_feeds(
    tmp_path, raw, chunk_bytes, end, members
):
    path = tmp_path / f"a.jsonl{end}"
    cuts = [len(raw) * number // members for number in range(members + 1)]
    path.write_bytes(b"".join(COMPRESS[end](raw[a:b]) for a, b in pairwise(cuts)))
    chunks = list(plan_chunks(find_inputs([path]).files, chunk_bytes=chunk_bytes, max_record_bytes=1 << 20))
    found = [line for chunk in chunks for segment in chunk.segments for line in read_lines(segment, max_bytes=1 << 20)]
    *whole, rest = raw.split(b"\n")
    assert found == [line + b"\n" for line in whole] + ([rest] if rest else [])
    assert sum(chunk.size_bytes for chunk in chunks) == path.stat().st_size


@pytest.mark.parametrize("end", COMPRESS)
def test_a_compressed_plain_text_is_one_document(tmp_path, end):
    (tmp_path / f"a.txt{end}").write_bytes(COMPRESS[end]("two\nlines é\n".encode()))
    run(tmp_path, f"a.txt{end}")
    assert texts_in(tmp_path) == ["two\nlines é\n"]


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_records_of_a_compressed_file_are_reported_with_their_lines(tmp_path, end, workers):
    raw = lines_of(["fine" * 10] * 300) + b"bad\n" + lines_of(["fine"] * 300) + b"\n{}\n"
    (tmp_path / f"a.jsonl{end}").write_bytes(COMPRESS[end](raw))
    report = run(tmp_path, f"a.jsonl{end}", skip_bad=True, workers=workers, chunk_bytes=500)
    assert [message.partition(f"a.jsonl{end}:")[2].split(":")[0] for message in report.first_bad] == ["301", "603"]


@pytest.mark.parametrize("end", COMPRESS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_compressed_file_that_is_cut_short_or_damaged_is_an_error_that_names_it(tmp_path, end, workers):
    texts = ["".join(map(chr, np.random.default_rng(n).integers(97, 122, 3000))) for n in range(200)]
    compressed = COMPRESS[end](lines_of(texts))
    for damaged, message in (
        (compressed[:-1], rf"must be a complete {end} file, found at byte \d+: "),
        (compressed[: len(compressed) // 2], rf"must be a complete {end} file, found at byte \d+: "),
        (compressed[:200_000] + b"damaged" + compressed[200_007:], "the data must have the checksum that is stored "),
    ):
        (tmp_path / f"a.jsonl{end}").write_bytes(damaged)
        with pytest.raises(FormatError, match=rf"a\.jsonl\{end}: {message}"):
            run(tmp_path, f"a.jsonl{end}", workers=workers, chunk_bytes=10_000)
    assert [path.name for path in tmp_path.iterdir()] == [f"a.jsonl{end}"]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_rows_of_a_parquet_file_are_documents(tmp_path, workers):
    columns = {"n": range(240), "text": TEXTS * 40, "title": ["t"] * 240}
    write_table(tmp_path / "a.parquet", columns, row_group_size=7, compression="zstd")
    report = run(tmp_path, "a.parquet", workers=workers, chunk_bytes=20_000, json_keys=("text", "title"))
    assert texts_in(tmp_path) == TEXTS * 40
    assert texts_in(tmp_path, "title") == ["t"] * 240
    assert (report.records, report.input_bytes) == (240, (tmp_path / "a.parquet").stat().st_size)


def test_strings_of_any_of_parquets_kinds_are_read(tmp_path):
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        write_table(tmp_path / "a.parquet", {"text": pa.array(TEXTS, pa.string()).cast(kind)})
        run(tmp_path, "a.parquet")
        assert texts_in(tmp_path) == [text for text in TEXTS if text]


def test_rows_that_cannot_be_used_are_reported_with_their_numbers(tmp_path):
    values = pa.array([b"fine", None, b"\xff", b"fine"] * 3, pa.binary())
    write_table(tmp_path / "a.parquet", {"text": values.view(pa.string())}, row_group_size=5)
    report = run(tmp_path, "a.parquet", skip_bad=True, chunk_bytes=1)
    assert (report.records, report.bad, report.outputs[0].documents) == (12, 6, 6)
    assert report.first_bad[0].endswith("a.parquet:2: the value of 'text' must be a string, found null")
    assert report.first_bad[-1].endswith(
        "a.parquet:11: text must be UTF-8, found the byte 0xff at byte 1 of the line (invalid start byte)"
    )


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"text": [1]}, "the column 'text' must hold strings, found int64"),
        ({"text": [["x"]]}, "the column 'text' must hold strings, found list"),
    ],
)
def test_a_parquet_file_whose_column_has_no_strings_is_an_error(tmp_path, columns, found):
    write_table(tmp_path / "a.parquet", columns)
    with pytest.raises(FormatError, match=rf"a\.parquet: .*{found}"):
        run(tmp_path, "a.parquet", skip_bad=True)


def test_without_skipping_a_column_that_is_missing_or_null_is_an_error_at_the_first_row(tmp_path):
    for columns, found in (
        ({"body": ["x"], "id": [1]}, "a Parquet file must have the column 'text', found 'body', 'id'"),
        ({"text": pa.nulls(2)}, "the value of 'text' must be a string, found null"),
    ):
        write_table(tmp_path / "a.parquet", columns)
        with pytest.raises(FormatError, match=rf"a\.parquet:1: {found}"):
            run(tmp_path, "a.parquet")


SHARDS = {
    "null": {"text": pa.nulls(5)},
    "dictionary of null": {"text": pa.DictionaryArray.from_arrays(pa.array([None] * 5, pa.int32()), pa.nulls(0))},
    "null strings": {"text": pa.array([None] * 5, pa.string())},
    "no column": {"body": ["x"] * 5},
    "no column at all but one of numbers": {"n": range(5)},
}


@pytest.mark.parametrize("columns", SHARDS.values(), ids=SHARDS)
def test_a_shard_without_texts_costs_its_rows(tmp_path, columns):
    write_and_count(tmp_path, columns)


@pytest.mark.parametrize("options", [{"workers": 2, "chunk_bytes": 1}, {"shard_bytes": 1 << 20}])
def test_it_does_so_in_workers_and_shards_of_the_output_too(tmp_path, options):
    write_and_count(tmp_path, SHARDS["no column"], **options)


def write_and_count(tmp_path, columns, **options):
    write_table(tmp_path / "a.parquet", {"text": ["a", "b"], "title": ["t", "t"]})
    write_table(tmp_path / "b.parquet", columns, row_group_size=2)
    report = run(tmp_path, "a.parquet", "b.parquet", skip_bad=True, **options)
    assert (report.records, report.bad, report.outputs[0].documents) == (7, 5, 2)
    assert [message.partition("b.parquet:")[2].split(":")[0] for message in report.first_bad] == list("12345")


def test_a_shard_that_lacks_one_of_several_columns_costs_its_rows(tmp_path):
    write_table(tmp_path / "a.parquet", {"text": ["a", "b"], "title": ["t", None]})
    write_table(tmp_path / "b.parquet", {"text": ["c", "d"]})
    report = run(tmp_path, "a.parquet", "b.parquet", skip_bad=True, json_keys=("title", "text"))
    assert (report.records, report.bad, texts_in(tmp_path)) == (4, 3, ["a"])
    assert "b.parquet:1: a Parquet file must have the column 'title', found 'text'" in report.first_bad[1]


def test_if_no_shard_has_the_column_there_is_no_pair(tmp_path):
    write_table(tmp_path / "a.parquet", {"body": ["x"], "id": [1]})
    with pytest.raises(PlanError, match=r"1 of them bad, the first one .*a\.parquet:1: .* found 'body', 'id'; --allow"):
        run(tmp_path, "a.parquet", skip_bad=True)


def test_damaged_shards_stay_errors_and_say_what_to_do(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(FormatError, match=r"found 0 bytes: its writer did not come to an end: remove the file, or wr"):
        run(tmp_path, "a.parquet", skip_bad=True)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines_of(TEXTS * 900))[:-9])
    with pytest.raises(FormatError, match=r"must be a complete \.gz file, found at byte .* copy or download it again"):
        run(tmp_path, "a.jsonl.gz", skip_bad=True)


def test_a_damaged_parquet_file_is_an_error_that_names_it(tmp_path):
    texts = ["".join(map(chr, np.random.default_rng(n).integers(97, 122, 3000))) for n in range(100)]
    write_table(tmp_path / "a.parquet", {"text": texts}, compression="zstd")
    raw = (tmp_path / "a.parquet").read_bytes()
    for damaged in (raw[:-10], raw[:1000] + bytes(5000) + raw[6000:], b"", b"PAR1"):
        (tmp_path / "a.parquet").write_bytes(damaged)
        with pytest.raises(FormatError, match=r"a\.parquet: must be a .*Parquet file"):
            run(tmp_path, "a.parquet")


def test_a_folder_stands_for_its_compressed_files_too(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("b.jsonl.gz", "c.txt.zst", "a.parquet", "d.gz", "e.parquet.gz", "f.tar.zst"):
        (tmp_path / "in" / name).write_bytes(b"x")
    found = [
        (file.path.name, file.format.value, file.compression.value) for file in find_inputs([tmp_path / "in"]).files
    ]
    assert found == [("a.parquet", "parquet", ""), ("b.jsonl.gz", "jsonl", ".gz"), ("c.txt.zst", "text", ".zst")]


@pytest.mark.parametrize(("library", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet")])
def test_a_library_that_is_missing_is_named_with_what_installs_it(tmp_path, library, name):
    (tmp_path / name).write_bytes(b"x")
    program = f"""
import sys
sys.modules[{library!r}] = None
from trackbed.cli.main import main
sys.argv = ["trackbed", "preprocess", {name!r}, "--tokenizer", "bytes", "--output", "out"]
main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    how = "pip install '.[text]' in Trackbed's clone"
    wanted = f"trackbed: {name}: the library {library} must be installed to use this ({how}): "
    assert done.stderr.startswith(wanted)


def test_a_parquet_file_with_two_columns_of_one_name_is_an_error(tmp_path):
    column = pa.array(["a", "b"])
    pq.write_table(pa.table([column, column, column], names=["text", "other", "text"]), tmp_path / "a.parquet")
    with pytest.raises(FormatError, match=r"a\.parquet: a Parquet file must have one column 'text', found 2"):
        run(tmp_path, "a.parquet")
    assert run(tmp_path, "a.parquet", json_keys=("other",)).records == 2


def test_of_many_columns_a_few_are_listed(tmp_path):
    pq.write_table(pa.table({f"c{number}": pa.array(["x"]) for number in range(30)}), tmp_path / "a.parquet")
    with pytest.raises(FormatError, match=r"the column 'text', found 'c0', .* 'c7' and 22 more"):
        run(tmp_path, "a.parquet")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz"])
def test_a_gzip_file_of_an_impossible_block_is_an_error_that_names_it(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"x" * 1000)[:10] + b"\xff" * 50)
    with pytest.raises(FormatError, match=r"must be a complete \.gz file, found at byte \d+: Error -1"):
        run(tmp_path, name)
